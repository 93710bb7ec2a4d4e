# Short names for what CONTRIBUTING.md describes.
.PHONY: install test slow lint format docs ci

install:
	pip install -e '.[dev]'

test:
	pytest

slow:
	pytest -m slow

lint:
	ruff check .
	ruff format --check .
	mypy

format:
	ruff check --fix .
	ruff format .

docs:
	python scripts/generate_docs.py

ci:
	.ci/run
