"""Which nodes of the graph an op bears the cost of, and how large its outputs really are."""

from torch import fx

from rekindle.capture.node_facts import NO_STORAGE, facts
from rekindle.profile import Profile
from rekindle.program.program import Program


def charged_nodes(program: Program) -> tuple[tuple[str, ...], ...]:
    """Per op: the nodes whose cost it bears, by name. Its own, and the views first made for it."""
    charged: set[fx.Node] = set()
    found = []
    for op in program.ops:
        names = []
        for node in op.nodes:
            views = []
            for view in node.all_input_nodes:
                # A view runs where it is first read, and is kept as long as it is used: only that
                # op pays.
                while view in program.base and view not in charged:
                    charged.add(view)
                    views.append(view.name)
                    view = program.base[view]
            names += [*reversed(views), node.name]
        found.append(tuple(names))
    return tuple(found)


def value_bytes(program: Program, profile: Profile) -> dict[int, int]:
    """By storage: the block that the op which makes it really gets, where the profile knows."""
    found: dict[int, int] = {}
    for op in program.ops:
        for node in op.nodes:
            sizes = profile[node.name].output_bytes
            for storage, position in _made(node):
                if position < len(sizes) and sizes[position]:
                    # The first op that makes a storage allocates it; later states are written into
                    # the same block.
                    found.setdefault(storage, sizes[position])
    return found


def _made(node: fx.Node) -> list[tuple[int, int]]:
    """The storages that a call gives back, with their positions among its outputs."""
    storage = facts(node).storage
    if storage != NO_STORAGE:
        return [(storage, 0)]
    parts = [(facts(user).storage, user) for user in node.users if len(user.args) == 2]
    return [
        (storage, user.args[1])
        for storage, user in parts
        if storage != NO_STORAGE and isinstance(user.args[1], int)
    ]
