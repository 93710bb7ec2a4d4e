"""Measuring a bundle: right actions, replies like the reference, perplexity, accepted drafts, skipped work."""
