"""The command line: `python -m lightning_sparse bench NAME`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lightning_sparse.bench import convergence, kernels, layers, network


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, `sys.argv` by default, and runs what it asks for."""
    parser = argparse.ArgumentParser(prog="python -m lightning_sparse", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    bench = commands.add_parser("bench", help="measure this machine")
    names = bench.add_subparsers(required=True, metavar="NAME")
    for module in (kernels, layers, convergence, network):
        module.add_parser(names)
    options = parser.parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    main()
