"""Op windowed_attention."""
