"""Random query strings."""

from __future__ import annotations

import random
from urllib.parse import urlencode

from pools import AGGREGATES, CLASSES, CUSTOM_TRAITS, ODD_NAMES, PROVIDERS, SHARES, TRAITS, World

Pairs = list[tuple[str, str]]


def candidates(rng: random.Random, world: World, minor: int) -> str:
    """Of GET /allocation_candidates, mostly one that this version takes."""
    bold = rng.random() < 0.05  # what this version may not take
    pairs: Pairs = []
    suffixes = _suffixes(rng, minor) if minor >= 25 or bold else []
    if not suffixes or rng.random() < 0.5:
        pairs += _group(rng, world, minor, "", bold)
    for suffix in suffixes:
        pairs += _group(rng, world, minor, suffix, bold, resourceless=minor >= 36 and rng.random() < 0.25)
    if (len(suffixes) > 1 and rng.random() < 0.95) or rng.random() < 0.03:
        pairs.append(("group_policy", rng.choice(["none", "isolate", "isolate", "none", "none", "other"][: 5 + bold])))
    if (minor >= 36 and len(suffixes) > 1 and rng.random() < 0.5) or (bold and rng.random() < 0.3):
        named = rng.sample(suffixes, rng.randint(min(2, len(suffixes)), len(suffixes))) or ["1"]
        pairs.append(("same_subtree", ",".join(named + (["X"] if rng.random() < 0.05 else []))))
    if (minor >= 35 or bold) and rng.random() < 0.15:
        pairs.append(("root_required", _required(rng, minor, allow_any=False)))
    if (minor >= 16 or bold) and rng.random() < 0.25:
        pairs.append(("limit", rng.choice(["1", "2", "3", "10", "1000", "0", "-1", "x", "1.5"][: 9 if bold else 5])))
    rng.shuffle(pairs)
    return urlencode(pairs, safe="!:,")


def _suffixes(rng: random.Random, minor: int) -> list[str]:
    count = rng.choice([0, 0, 1, 1, 2, 2, 3])
    words = ["1", "2", "3"] if minor < 33 or rng.random() < 0.5 else ["_NET", "_a-1", "X9"]
    return words[:count]


def _group(
    rng: random.Random, world: World, minor: int, suffix: str, bold: bool, *, resourceless: bool = False
) -> Pairs:
    pairs: Pairs = []
    if not resourceless:
        pairs.append((f"resources{suffix}", resources(rng, world)))
    if (minor >= 17 or bold) and rng.random() < (0.8 if resourceless else 0.35):
        pairs.append((f"required{suffix}", _required(rng, minor, allow_any=minor >= 39)))
        if minor >= 39 and rng.random() < 0.3:
            pairs.append((f"required{suffix}", _required(rng, minor, allow_any=True)))
    if (minor >= 21 or bold) and rng.random() < 0.25:
        pairs += _members(rng, minor, f"member_of{suffix}")
    if (minor >= 31 or bold) and rng.random() < 0.15:
        pairs.append((f"in_tree{suffix}", rng.choice(sorted(world.providers) or PROVIDERS)))
    return pairs


def resources(rng: random.Random, world: World) -> str:
    """`VCPU:1,...`, of classes that some provider has, mostly."""
    there = sorted(set().union(*world.providers.values())) or CLASSES
    names = rng.sample(there, min(len(there), rng.choice([1, 1, 2, 2, 3])))
    if rng.random() < 0.03:
        names.append(rng.choice(CLASSES + ODD_NAMES))
    amounts = [f"{name}:{rng.choice([1, 1, 1, 2, 2, 4, 8])}" for name in names]
    if rng.random() < 0.03:
        amounts.append(rng.choice(["VCPU", "VCPU:", "VCPU:x", "VCPU:0", "VCPU:-1", "VCPU:1:2", "", ":1", "VCPU:1.5"]))
    return ",".join(amounts)


def _trait(rng: random.Random) -> str:
    return rng.choice(CUSTOM_TRAITS if rng.random() < 0.75 else TRAITS if rng.random() < 0.9 else ODD_NAMES)


def _required(rng: random.Random, minor: int, *, allow_any: bool) -> str:
    if allow_any and rng.random() < 0.4:
        return "in:" + ",".join(_trait(rng) for _ in range(rng.choice([1, 2, 2])))
    names = [_trait(rng) for _ in range(rng.choice([1, 1, 2]))]
    if minor >= 22 or rng.random() < 0.05:
        names = [("!" if rng.random() < 0.4 else "") + name for name in names]
    if rng.random() < 0.02:
        names.append(rng.choice(["", "!", "in:CUSTOM_GOLD", "!!CUSTOM_GOLD", SHARES.lower()]))
    return ",".join(names)


def _members(rng: random.Random, minor: int, name: str) -> Pairs:
    pairs: Pairs = []
    for _ in range(2 if minor >= 24 and rng.random() < 0.2 else 1):
        chosen = rng.sample(AGGREGATES, rng.choice([1, 1, 2]))
        value = f"in:{','.join(chosen)}" if len(chosen) > 1 or rng.random() < 0.3 else chosen[0]
        if minor >= 32 and rng.random() < 0.35:
            value = "!" + value
        if rng.random() < 0.03:
            value = rng.choice(["", "x", "in:", "!in:", value.upper(), value.replace("-", ""), ",".join(AGGREGATES)])
        pairs.append((name, value))
    return pairs


def providers(rng: random.Random, world: World, minor: int) -> str:
    """Of GET /resource_providers."""
    bold = rng.random() < 0.06
    pairs: Pairs = []
    if rng.random() < 0.2:
        pairs.append(("name", rng.choice(["p0", "p3", "nobody", ""])))
    if rng.random() < 0.15:
        pairs.append(("uuid", rng.choice([*PROVIDERS[:4], "x", PROVIDERS[0].upper(), PROVIDERS[0].replace("-", "")])))
    if (minor >= 3 or bold) and rng.random() < 0.3:
        pairs += _members(rng, minor, "member_of")
    if (minor >= 4 or bold) and rng.random() < 0.35:
        pairs.append(("resources", resources(rng, world)))
    if (minor >= 14 or bold) and rng.random() < 0.2:
        pairs.append(("in_tree", rng.choice([*PROVIDERS, PROVIDERS[1].upper()])))
    if (minor >= 18 or bold) and rng.random() < 0.35:
        pairs.append(("required", _required(rng, minor, allow_any=minor >= 39)))
    return urlencode(pairs, safe="!:,")


def traits(rng: random.Random) -> str:
    """Of GET /traits; never all of the standard ones, which differ between releases of os-traits."""
    value = rng.choice(
        [
            "startswith:CUSTOM",
            "startswith:CUSTOM_G",
            "in:CUSTOM_GOLD,HW_CPU_X86_AVX2",
            "in:",
            "startswith:",
            "x",
            "in:x,y",
        ]
    )
    pairs = [("name", value if value != "startswith:" else "startswith:MISC_SHARES")]
    if rng.random() < 0.4:
        pairs.append(("associated", rng.choice(["true", "false", "True", "1", "", "x", "FALSE"])))
    return urlencode(pairs, safe="!:,")
