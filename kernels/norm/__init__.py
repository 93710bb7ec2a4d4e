"""Op norm."""
