# Short names for what CONTRIBUTING.md describes.
.PHONY: install test lint format docs ci

install:
	pip install -e '.[dev]'

test:
	pytest

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
