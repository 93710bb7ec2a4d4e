"""Checks what the README says only an Orin can show, and writes report.json and report.md.

    jetson/verify.sh --bundle DIR [--output DIR] [--build]

Exit code: 0 when nothing was refuted (what could not be checked is listed), 1 when something was, 2 on bad input.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import checks
import machine
import report

from mimo_edge.device.system import System


def main() -> int:
    parser = argparse.ArgumentParser(prog="verify.sh", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--bundle", type=Path, help="exported with --target orin; without it only the CPU is looked at")
    parser.add_argument("--output", type=Path, default=Path("mimo-edge-verify"), help="folder of the report")
    parser.add_argument("--build", action="store_true", help="build TensorRT's engines first (minutes)")
    parser.add_argument("--root", type=Path, default=Path("/"), help="read /proc, /sys and /etc below it (for tests)")
    options = parser.parse_args()
    if options.bundle is not None and not (options.bundle / "manifest.json").is_file():
        print(f"verify.sh: error: {options.bundle} is not a bundle: see mimo-edge export --help", file=sys.stderr)
        return 2
    system = System(options.root)
    facts = machine.facts(system)
    for name, value in facts.items():
        print(f"{name}: {value}")
    findings = []
    for finding in checks.everything(system, options.bundle, options.build):
        findings.append(finding)
        print(f"{finding.status}: {finding.claim} ({finding.detail})", flush=True)
    data, text = report.write(options.output, facts, findings)
    print(f"{report.summary(findings)}; wrote {data} and {text}")
    return int(any(f.status == "refuted" for f in findings))


if __name__ == "__main__":
    sys.exit(main())
