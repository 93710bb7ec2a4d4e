"""Op sampling."""
