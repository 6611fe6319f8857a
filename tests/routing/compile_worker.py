"""Every kernel that whole chains launch, put through Triton's front end for an H200: no GPU is needed.

Chains run on CPU tensors, forward and backward, with launches that only note what they are given. Prints a line a
refused kernel, and at the end how many there were. Not for Triton's interpreter, which takes what a compiler refuses.
"""

import itertools

import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, mangle_type

from megatron_mhar.bench.reads import Case, Inputs, fused, run
from megatron_mhar.depth.residual import ResidualConfig
from megatron_mhar.depth.sites import DepthTable
from megatron_mhar.routing.chain import start

H200 = GPUTarget("cuda", 90, 32)
WIDTHS = (64, 512, 768, 1000, 1280, 4096, 8192)
HEADS = (1, 2, 4, 8, 16, 32)
FORMS = (
    ("mhar", True, {}),
    ("mhar_block", True, {"block_layers": 2}),
    ("delta", False, {}),
    ("delta_block", False, {"block_layers": 1}),
)
launched = {}


def note(kernel, *arguments, grid, warmup, **keywords):
    """In place of ``JITFunction.run``: the kernel as a source for the compiler."""
    given = dict(zip(kernel.arg_names, arguments)) | keywords
    fixed = {p.name for p in kernel.params if p.is_constexpr} | {n for n in kernel.arg_names if given[n] is None}
    signature = tuple((n, "constexpr" if n in fixed else mangle_type(given[n])) for n in kernel.arg_names)
    constants = tuple(((i,), given[n]) for i, n in enumerate(kernel.arg_names) if n in fixed)
    options = tuple(sorted((n, value) for n, value in keywords.items() if n not in kernel.arg_names))
    launched.setdefault((kernel, signature, constants, options), None)


def compile_front(kernel, signature, constants, options):
    """Raises what the compiler has against it."""
    source = ASTSource(fn=kernel, signature=dict(signature), constexprs=dict(constants))
    backend, context = make_backend(H200), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options(dict(options))
    source.make_ir(H200, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)


def main():
    JITFunction.run = note
    for width, heads, dtype in itertools.product(WIDTHS, HEADS, (torch.bfloat16, torch.float32)):
        if width % heads or (dtype == torch.float32 and width != 1280):
            continue
        before = len(launched)
        for method, normed, keys in FORMS:
            table = DepthTable(ResidualConfig(method=method, num_heads=heads, **keys), 34)
            case = Case(table, width, 3, dtype, normed=normed)
            inputs = Inputs(case, torch.device("cpu"))
            run(fused, inputs, backward=True)
            unread = start(case.plan, inputs.sites)
            unread.add(0, inputs.sources[0])
            unread.settle()  # what a pipeline stage does before it sends a source on
        for kernel, *launch in list(launched)[before:]:
            try:
                compile_front(kernel, *launch)
            except Exception as error:
                where = " ".join(str(error).split())[-160:]
                print(f"REFUSED {kernel.__name__} at d={width}, H={heads}, {dtype}: {where}", flush=True)
    print(f"{len(launched)} launches of {sorted({kernel.__name__ for kernel, *_ in launched})}")


if __name__ == "__main__":
    main()
