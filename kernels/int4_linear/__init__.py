"""Op int4_linear."""
