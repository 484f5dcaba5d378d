"""The command line the example scripts share, and the strategy it asks for."""

import argparse
from typing import Any

import torch
from pytorch_lightning.strategies import Strategy, StrategyRegistry

import lightning_sparse  # noqa: F401  registers its strategies

SPARSE = "sparse_ddp"
COMPRESSORS = ("blocks", "topk", "sampled")


def make_parser(description: str, *, max_steps: int, batch_size: int, lr: float) -> argparse.ArgumentParser:
    """Returns the command line both scripts understand."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--strategy", default=SPARSE, help="Lightning strategy, such as sparse_ddp or ddp")
    parser.add_argument("--compare", metavar="STRATEGY", help="train again with this strategy, same seed and data")
    parser.add_argument("--exchange", choices=["auto", "gradients", "updates"], default="auto", help="what ranks send")
    parser.add_argument("--memory", choices=["residual", "momentum"], default="residual", help="for gradients only")
    parser.add_argument(
        "--density", type=float, help="fraction of entries sent, in (0, 1]; unset: the strategy's default"
    )
    parser.add_argument("--compressor", choices=["auto", *COMPRESSORS], default="auto", help="which entries are sent")
    parser.add_argument("--scope", choices=["model", "bucket", "layer"], default="model", help="of topk and sampled")
    parser.add_argument("--values", choices=["fp32", "bf16", "fp16"], help="on the wire, with topk and sampled")
    parser.add_argument("--bits", type=int, choices=[1, 2, 4, 8], help="on the wire, with blocks")
    parser.add_argument("--anchor-step", type=float, help="for updates only; unset: the strategy's default")
    parser.add_argument("--lr-scale", type=float, help="for updates only; unset: the strategy's default")
    parser.add_argument("--outer-momentum", type=float, help="for updates only")
    parser.add_argument("--decay", type=float, help="of unshared progress, for updates only")
    parser.add_argument("--every", type=int, help="steps between exchanges, for updates only")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, help="for updates only")
    parser.add_argument(
        "--guard",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="change over to DDP where that is faster, which would compare DDP with DDP",
    )
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, help="ranks; unset: every GPU, or 2 CPU processes below two GPUs")
    parser.add_argument("--threads", type=int, help="CPU threads of one rank; unset: cores / ranks")
    parser.add_argument("--max-steps", type=int, default=max_steps)
    parser.add_argument("--batch-size", type=int, default=batch_size, help="examples per rank and step")
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--plot", metavar="FILE", help="draw validation loss over steps and bytes there (PNG)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no log")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Reads the command line, refuses what does not fit together, and fills in the devices."""
    options = parser.parse_args()
    if options.memory == "momentum" and options.exchange != "gradients":
        parser.error("--memory momentum needs --exchange gradients")
    if options.exchange == "gradients" and updates_arguments(options):
        given = ", ".join(f"--{name.replace('_', '-')}" for name in updates_arguments(options))
        parser.error(f"{given}: for updates only, got --exchange gradients")
    if options.values and options.bits:
        parser.error("--values goes with --compressor topk or sampled, --bits with blocks: give one of them")
    if options.bits and options.compressor in ("topk", "sampled"):
        parser.error("--bits needs --compressor blocks")
    if options.values and options.compressor == "blocks":
        parser.error("--values needs --compressor topk or sampled")
    if options.values and options.compressor == "auto":
        options.compressor = "topk"
    for name in (options.strategy, options.compare):
        if name is None:
            continue
        if name not in StrategyRegistry:
            parser.error(f"expected a registered strategy, such as {SPARSE} or ddp, got {name!r}")
        if any(method in name for method in ("spawn", "fork", "notebook")):
            parser.error(f"expected a strategy whose ranks return to this script, got {name}: use {SPARSE} or ddp")
    for name in ("max_steps", "batch_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if options.devices is None:
        gpus = torch.cuda.device_count() if options.accelerator in ("auto", "gpu", "cuda") else 0
        if options.accelerator == "auto" and gpus < 2:
            options.accelerator = "cpu"
        options.devices = 2 if options.accelerator == "cpu" else max(1, gpus)
    return options


def updates_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `Updates` that were given on the command line."""
    names = ("every", "anchor_step", "lr_scale", "outer_momentum", "decay", "overlap")
    given = {name: getattr(options, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def make_strategy(name: str, options: argparse.Namespace) -> str | Strategy:
    """Returns what `Trainer(strategy=...)` takes: the name, or our strategy with the options of the command line."""
    if not name.startswith(SPARSE):
        return name
    from lightning_sparse import (
        Gradients,
        MomentumResidual,
        Quantized,
        Raw,
        SampledTopK,
        SparseDDPStrategy,
        TopK,
        Updates,
        WeightBlocks,
    )

    exchange: str | Gradients | Updates = "auto"
    if options.exchange == "gradients":
        exchange = Gradients()
    elif options.exchange == "updates" or updates_arguments(options):
        exchange = Updates(**updates_arguments(options))
    memory = MomentumResidual(0.9) if options.memory == "momentum" else None
    compressors = {
        "auto": None,
        "blocks": WeightBlocks(),
        "topk": TopK(options.scope),
        "sampled": SampledTopK(scope=options.scope),
    }
    codec = Quantized(options.bits) if options.bits else Raw(options.values) if options.values else None
    return SparseDDPStrategy(
        density=options.density,
        exchange=exchange,
        compressor=compressors[options.compressor],
        memory=memory,
        codec=codec,
        guard=options.guard,
        **StrategyRegistry[name]["init_params"],
    )
