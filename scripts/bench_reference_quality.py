"""Quality of the reference model in float and INT4, dense and gated, on all held-out commands and general text.

    python -m scripts.reference_model.prepare TEXT TOKENIZER.json DATA
    python -m scripts.bench_reference_quality measure --data DATA --float CHECKPOINT --bundle rtn=BUNDLE --out OUT/a.npz
    python -m scripts.bench_reference_quality report OUT/*.npz --data DATA --checkpoint CHECKPOINT --out OUT

`measure` needs a GPU (or --limit and patience), PyTorch, and neither a tokenizer nor an installed package. It may run
several times with other bundles: `report` puts all files together, paired by command.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("measure", help="run the models; writes one .npz")
    measure.add_argument("--data", type=Path, required=True, help="prepare.py's output folder")
    measure.add_argument("--float", type=Path, help="checkpoint folder of the float model")
    measure.add_argument("--bundle", action="append", default=[], metavar="NAME=DIR", help="may be given again")
    measure.add_argument("--curve", nargs="*", default=[], metavar="NAME", help="models to draw skip curves of")
    measure.add_argument("--heads", nargs="*", default=[], metavar="NAME", help="models to ablate MTP heads of")
    measure.add_argument("--out", type=Path, required=True)
    measure.add_argument("--limit", type=int, help="so many commands and rows of text, to try everything out")
    measure.add_argument("--length", type=int, default=8192, help="tokens a row")
    measure.add_argument("--batch", type=int, default=8)
    measure.add_argument("--brief", action="store_true", help="predictions only: no replies, no continuations")
    measure.add_argument("--eager", action="store_true", help="compile nothing: quicker for one model in short rows")
    measure.add_argument("--minutes", type=float, default=8.0, help="start nothing new after this")
    report = commands.add_parser("report", help="tables, plot and JSON out of measure's files")
    report.add_argument("files", type=Path, nargs="+")
    report.add_argument("--data", type=Path, required=True)
    report.add_argument("--checkpoint", type=Path, required=True, help="folder with tokenizer.json")
    report.add_argument("--baseline", default="float", help="model that all are compared with")
    report.add_argument("--out", type=Path, required=True)
    return p.parse_args()


def main() -> None:
    args = arguments()
    if args.command == "measure":
        from scripts.reference_model.quality.measure import measure

        bundles = dict(b.split("=", 1) for b in args.bundle)
        if unknown := set(args.curve + args.heads) - {"float", *bundles}:
            sys.exit(f"no model {sorted(unknown)[0]!r} among those measured")
        measure(args, {name: Path(folder) for name, folder in bundles.items()})
    else:
        from scripts.reference_model.quality.report import report

        report(args)


if __name__ == "__main__":
    main()
