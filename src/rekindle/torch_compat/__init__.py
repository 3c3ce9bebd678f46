"""The only room that touches private torch API, for torch 2.11 to 2.15: one module per subject.

What the rest of the house may use of it stands in `__all__`, and is imported from here: in which
subject a name is found may change with a release of torch. Where a release lacks a piece, or may
have it with another meaning, the fallback stands beside it.
"""

from rekindle.supported_torch import missing_names_explained  # first: it refuses older releases

# isort: split
with missing_names_explained():
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    from rekindle.torch_compat.autograd import (
        backward_keeps_graph,
        backward_node,
        differentiated_now,
        forward_sequence_nr,
        kept_tensors,
        node_sequence_nr,
        outputs_below,
    )
    from rekindle.torch_compat.cuda_kernels import CudaKernel
    from rekindle.torch_compat.dynamo import (
        CallGuards,
        GraphBreak,
        GraphInput,
        Reading,
        is_saved_region,
        read_call,
    )
    from rekindle.torch_compat.dynamo_answers import Ask, Returned, answering, asked
    from rekindle.torch_compat.fake_tensors import (
        DEVICE_OF,
        UNSUPPORTED,
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        KeptAnswers,
        default_device,
        dispatch_with_symbols,
        eager_layouts_answered,
        filling_stand_in,
        fresh_like,
        new_fake_mode,
        remade,
        run_below,
    )
    from rekindle.torch_compat.fx_graphs import (
        add_call,
        interpreted_line,
        source_line,
        told_without_nodes,
    )
    from rekindle.torch_compat.inductor import (
        CompiledText,
        compile_graph,
        cut_in_two,
        functional_trace,
        inductor_settings,
        symbol_free_fake_mode,
        trace_as,
    )
    from rekindle.torch_compat.memory_pools import MemoryPool
    from rekindle.torch_compat.ops import (
        as_modules_call,
        bare_call,
        copy_all,
        is_higher_order,
        is_overload,
        named_call,
        nn_functions,
    )
    from rekindle.torch_compat.running import (
        as_eager_calls,
        compiled_kernels,
        eager_kernels,
        outside_function_modes,
        outside_modes,
        push_mode,
        recurrent_layers_call,
        run_saved_regions_plainly,
        transform_around,
    )
    from rekindle.torch_compat.storages import (
        borrowed,
        python_references,
        storage_bytes,
        storage_key,
    )
    from rekindle.torch_compat.symbols import (
        NotASize,
        conditions_of,
        every_decision_noted,
        expression_key,
        free_symbols,
        has_symbols,
        hint_of,
        is_symbolic,
        known_dense,
        known_equal,
        num_guards,
        pinned,
        size_text,
        symbol_name,
        tracing_symbols,
    )

__all__ = [
    "DEVICE_OF",
    "UNSUPPORTED",
    "Ask",
    "CallGuards",
    "CompiledText",
    "CudaKernel",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "GraphBreak",
    "GraphInput",
    "KeptAnswers",
    "MemoryPool",
    "NotASize",
    "Reading",
    "Returned",
    "TorchDispatchMode",
    "add_call",
    "answering",
    "as_eager_calls",
    "as_modules_call",
    "asked",
    "backward_keeps_graph",
    "backward_node",
    "bare_call",
    "borrowed",
    "compile_graph",
    "compiled_kernels",
    "conditions_of",
    "copy_all",
    "cut_in_two",
    "default_device",
    "differentiated_now",
    "dispatch_with_symbols",
    "eager_kernels",
    "eager_layouts_answered",
    "every_decision_noted",
    "expression_key",
    "filling_stand_in",
    "forward_sequence_nr",
    "free_symbols",
    "fresh_like",
    "functional_trace",
    "has_symbols",
    "hint_of",
    "inductor_settings",
    "interpreted_line",
    "is_higher_order",
    "is_overload",
    "is_saved_region",
    "is_symbolic",
    "kept_tensors",
    "known_dense",
    "known_equal",
    "named_call",
    "new_fake_mode",
    "nn_functions",
    "node_sequence_nr",
    "num_guards",
    "outputs_below",
    "outside_function_modes",
    "outside_modes",
    "pinned",
    "push_mode",
    "python_references",
    "pytree",
    "read_call",
    "recurrent_layers_call",
    "remade",
    "run_below",
    "run_saved_regions_plainly",
    "size_text",
    "source_line",
    "storage_bytes",
    "storage_key",
    "symbol_free_fake_mode",
    "symbol_name",
    "told_without_nodes",
    "trace_as",
    "tracing_symbols",
    "transform_around",
]
