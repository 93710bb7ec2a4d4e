"""Op sparse_ffn."""
