"""Op mtp."""
