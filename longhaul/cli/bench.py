"""The command `bench`: a benchmark by its name, one JSON object per figure."""

from __future__ import annotations

from collections.abc import Sequence

from longhaul.cli import flags, tables
from longhaul.cli.flags import DEBUG, FLOAT, INT, OUTPUT, PATH, TEXT, Flag, FlagError, choice

LANE = choice(("shm", "grpc", "tcp", "folder"))

SIZES = (
    Flag("data", PATH, (), "of driving-step, driving-env: the logs; without: generated scenarios", many=True),
    Flag("objects", INT, (), "likewise: objects at most, a figure for each; a power of two", many=True, shown="32, 64"),
    Flag("batch", INT, None, "likewise: worlds; of replay and sac: steps of a sample", shown="256"),
    Flag("devices", INT, None, "likewise: devices", shown="as a training run"),
    Flag("agents", INT, (), "of driving-env: controlled agents at most, a figure for each", many=True, shown="1"),
    Flag("road_points", INT, None, "of driving-env: pieces of road that an agent sees", shown="0"),
    Flag("num_envs", INT, None, "of cartpole, driving-train, hackmatrix-env, hackmatrix-ppo: worlds", shown="256"),
    Flag("num_steps", INT, None, "of all but those of cartpole and driving-train: steps of each", shown="its own"),
    Flag("precision", choice(("fp32", "bf16")), None, "of hackmatrix-ppo, sac", shown="fp32"),
    Flag("env", TEXT, (), "of actors, central and sac: environments, a figure for each", many=True, shown="its own"),
    Flag("actors", INT, None, "likewise: how many", shown="2"),
    Flag("worlds", INT, None, "of central: worlds of each group of an actor", shown="256"),
    Flag("slots", INT, None, "likewise: groups of an actor", shown="2"),
    Flag("actor_kind", choice(("process", "thread")), None, "of actors", shown="process"),
    Flag("staleness", INT, None, "of actors", shown="1"),
    Flag("streams", INT, None, "of transport: slots of the client", shown="16"),
    Flag("model", TEXT, None, "of sync: whose parameters, by its name", shown="qwen3-0.6b"),
    Flag("receivers", INT, None, "of sync: processes", shown="2"),
    Flag(
        "lane",
        LANE,
        (),
        "a figure for each: shm, grpc of central; shm, tcp, folder of sync",
        many=True,
        shown="the first 2",
    ),
    Flag("rules", choice(("jax", "canonical")), None, "of hackmatrix-env", shown="jax"),
    Flag("recipe", TEXT, (), "of train: recipes, a figure for each", many=True, shown="cartpole"),
    Flag("columns", INT, None, "of replay: rows are so wide", shown="64"),
    Flag("size", INT, None, "of replay, and of sac in --env: steps that it holds", shown="1000000, 65536"),
    Flag("fill", FLOAT, None, "of sac in --env: the share of its replay that is full", shown="0"),
    Flag("gradient_steps", INT, (), "likewise: steps of the optimiser, a figure for each", many=True, shown="1, 16"),
    Flag("peer_python", PATH, None, "the Python that has flashbax (of replay), Brax (of sac) or transformers"),
)
"""Flags of the sizes of benchmarks, each of some of them alone."""


def bench(argv: Sequence[str]) -> int:
    """`longhaul bench NAME [--json FILE]`."""
    if argv and argv[0] == "hackmatrix":
        from longhaul.cli import bench_hackmatrix

        return bench_hackmatrix.run(argv[1:])
    name = Flag("NAME", TEXT, None, "which; without: lists them")
    out = Flag("json", OUTPUT, None, "write the figures as a list to this file, too")
    groups = {"": [name, out, DEBUG], "sizes": SIZES}
    about = "Measures; one JSON object per figure. longhaul bench hackmatrix has flags of its own: --grid --num-envs "
    about += "--num-steps --precision --devices --repeats --json --page; see longhaul bench hackmatrix --help."
    parsed = flags.parse("bench", about, groups, argv).values

    from longhaul.bench import harness

    if parsed["NAME"] is None:
        tables.listing((name, benchmark.about) for name, benchmark in harness.BENCHMARKS.items())
        return 0
    if parsed["NAME"] not in harness.BENCHMARKS:
        hint = flags.suggestion(parsed["NAME"], list(harness.BENCHMARKS), f"there are {', '.join(harness.BENCHMARKS)}")
        raise FlagError(f"no benchmark is named {parsed['NAME']!r}; {hint}")
    sizes = {f.name: parsed[f.name] for f in SIZES if parsed[f.name] not in (None, (), [])}
    compared = ("replay", "sac", "reasoning")
    known = {*harness.BENCHMARKS[parsed["NAME"]].sizes, *(["peer_python"] if parsed["NAME"] in compared else [])}
    unknown = [name for name in sizes if name not in known]
    if unknown:
        raise FlagError(f"{parsed['NAME']} has no --{unknown[0].replace('_', '-')}; see longhaul bench --help")
    figures = []
    for figure in harness.run(parsed["NAME"], **sizes):
        figures.append(figure)
        tables.write_line(figure)
    if parsed["json"] not in (None, "-"):
        tables.write_json(parsed["json"], figures)
    return 0
