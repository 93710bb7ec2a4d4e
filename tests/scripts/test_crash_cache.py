"""The crash loop of scripts/crash_cache.py, a few kills of it; 300 are run by hand."""

from scripts.crash_cache import crash


def test_killed_writers_leave_whole_entries_within_the_budget(tmp_path):
    assert "all whole" in crash(tmp_path / "cache", kills=3, seed=5)
