"""Op int4_embedding."""
