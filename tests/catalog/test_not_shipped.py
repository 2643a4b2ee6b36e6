# SPDX-License-Identifier: Apache-2.0
"""What ``docs/not_shipped.md`` says of releases, asked of the releases.

Some small functions are taken out of a release's source and run alone, with stand-ins for the few names that they use;
of the others it is read what they call. Nothing of a release is imported.
"""

from __future__ import annotations

import ast
import contextlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from megatron_fixes import catalog
from megatron_fixes.proofs.releases import fetch

MATRIX = catalog.load().matrix
RELEASES = sorted(MATRIX.releases, key=Version)
CORE = "megatron/core"
TRAINING = "megatron/training"
each_release = pytest.mark.parametrize("release", RELEASES)


def at_least(release: str, first: str) -> bool:
    return Version(release) >= Version(first)


def function(release: str, path: str, *names: str) -> Any:
    """A function of a release, named by its class and itself, as a syntax tree without annotations."""
    node: Any = ast.parse((fetch(release, MATRIX) / path).read_text("utf-8"))
    for name in names:
        node = next(n for n in ast.walk(node) if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == name)
    node.returns = None
    for argument in [*node.args.args, *node.args.kwonlyargs]:
        argument.annotation = None
    return node


def made(node: Any, **names: Any) -> Any:
    """That function, ready to be called; ``names`` stand for the globals that it uses."""
    exec(compile(ast.fix_missing_locations(ast.Module([node], [])), "release", "exec"), names)
    return names[node.name]


@each_release
def test_training_code_is_in_the_wheel_from_0_17_on(release: str) -> None:
    assert (fetch(release, MATRIX) / TRAINING).is_dir() == at_least(release, "0.17.0")


@pytest.mark.parametrize("release", [r for r in RELEASES if at_least(r, "0.17.0")])
def test_the_state_of_random_numbers_is_saved_without_the_expert_parallel_rank(release: str) -> None:
    text = ast.unparse(function(release, f"{TRAINING}/checkpointing.py", "get_rng_state"))
    assert "(pp_size, tp_size), (pp_rank, tp_rank)" in text
    assert "replica_id=" in text
    assert "expert" not in text


@pytest.mark.parametrize("release", [r for r in RELEASES if at_least(r, "0.17.0")])
def test_the_norm_of_sharded_parameters_is_reduced_on_every_rank(release: str) -> None:
    folder = "utils/common_utils.py" if at_least(release, "0.18.0") else "utils.py"
    node = function(release, f"{TRAINING}/{folder}", "calc_params_l2_norm")
    calls = [ast.unparse(n.value) for n in node.body if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
    assert [c for c in calls if c.startswith(("torch.distributed.all_reduce(sharded_", "_sum_reduce(sharded_"))]


@each_release
def test_an_activation_that_is_being_sent_is_freed_before_its_send_ended_until_0_18(release: str) -> None:
    path = f"{CORE}/pipeline_parallel/schedules.py"
    node = function(release, path, "forward_backward_pipelining_with_interleaving")
    assert "fwd_wait_handles.pop('send_next')" in ast.unparse(node)
    assert "deallocate_output_tensor(output_tensor, config.deallocate_pipeline_outputs)" in ast.unparse(node)
    tests = [ast.unparse(n.test) for n in ast.walk(node) if isinstance(n, ast.If)]
    waits = [test for test in tests if "send_next_wait_handle" in test and "deallocate_pipeline_outputs" in test]
    assert bool(waits) == at_least(release, "0.18.0")


@each_release
def test_a_nested_fork_of_the_random_state_goes_on_where_the_outer_one_is_from_0_16_on(release: str) -> None:
    now = {"state": 0}
    fork = made(
        function(release, f"{CORE}/tensor_parallel/random.py", "CudaRNGStatesTracker", "fork"),
        contextlib=contextlib,
        logging=logging,
        torch=SimpleNamespace(get_rng_state=lambda: 0, all=lambda _: SimpleNamespace(item=lambda: True)),
        _MODEL_PARALLEL_RNG_TRACKER_NAME="model-parallel-rng",
        _get_cuda_rng_state=lambda **_: now["state"],
        _set_cuda_rng_state=lambda state, **_: now.update(state=state),
    )
    tracker = SimpleNamespace(
        states_={"a": 100, "b": 200}, use_cudagraphable_rng=False, _current_state_name="default-rng"
    )
    with fork(tracker, "a"):
        now["state"] += 1  # a number is drawn
        with fork(tracker, "b"), fork(tracker, "a"):
            assert now["state"] == (101 if at_least(release, "0.16.0") else 100)
        with fork(tracker, "a"):
            assert now["state"] == (101 if at_least(release, "0.16.0") else 100)


@each_release
def test_forward_hooks_can_not_be_disabled_twice(release: str) -> None:
    path = f"{CORE}/distributed/distributed_data_parallel.py"
    disable = made(function(release, path, "DistributedDataParallel", "disable_forward_pre_hook"))
    handles = {"layer": SimpleNamespace(remove=lambda: None)}
    ddp = SimpleNamespace(
        use_forward_hook=True,
        module=SimpleNamespace(modules=lambda: ["layer"]),
        remove_forward_pre_hook_handles=handles,
    )
    disable(ddp, param_sync=False)
    assert handles == {}
    with pytest.raises(KeyError):
        disable(ddp, param_sync=False)


@each_release
def test_an_interleaved_evaluation_that_raises_leaves_the_sync_functions_unset(release: str) -> None:
    path = f"{CORE}/pipeline_parallel/schedules.py"
    node = function(release, path, "forward_backward_pipelining_with_interleaving")
    text = ast.unparse(node)
    taken = text.index("config.grad_sync_func, config.param_sync_func = (None, None)")
    given = text.index("config.grad_sync_func, config.param_sync_func = (grad_sync_func, param_sync_func)")
    assert taken < given
    assert not any(isinstance(n, ast.Try) for n in ast.walk(node))


@each_release
def test_each_optimizer_of_a_chain_gathers_the_parameters_of_the_whole_model_until_0_18(release: str) -> None:
    path = f"{CORE}/optimizer/distrib_optimizer.py"
    text = ast.unparse(function(release, path, "DistributedOptimizer", "step_with_ready_grads"))
    assert ("start_param_sync_for_bucket_group_subset()" in text) == at_least(release, "0.18.0")
    assert "model_chunk.start_param_sync()" in text


@each_release
def test_the_handle_of_the_overlapped_input_gradient_is_a_local_variable(release: str) -> None:
    path = f"{CORE}/tensor_parallel/layers.py"
    node = function(release, path, "LinearWithGradAccumulationAndAsyncCommunication", "backward")
    kept = {
        ast.unparse(target)
        for n in ast.walk(node)
        if isinstance(n, ast.Assign) and "async_op=True" in ast.unparse(n.value)
        for target in n.targets
    }
    assert kept == {"handle"}
    assert not any(isinstance(n, (ast.Global, ast.Nonlocal)) for n in ast.walk(node))


@each_release
def test_copies_of_the_dispatcher_to_the_host_are_recorded_on_their_stream(release: str) -> None:
    move = ast.unparse(function(release, f"{CORE}/transformer/moe/moe_utils.py", "maybe_move_tensor_to_cpu"))
    assert "tensor.record_stream(torch.cuda.current_stream())" in move
    tree = ast.parse((fetch(release, MATRIX) / CORE / "transformer/moe/token_dispatcher.py").read_text("utf-8"))
    calls = [ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Call)]
    moves = [call for call in calls if call.startswith("maybe_move_tensor_to_cpu(")]
    assert len(moves) == 6
    assert all("record_stream=on_side_stream" in call for call in moves)


@pytest.mark.parametrize("release", [r for r in RELEASES if not at_least(r, "0.19.0")])
def test_norm_clipping_and_counting_read_a_precise_gradient_by_the_same_flags(release: str) -> None:
    path = f"{CORE}/optimizer/optimizer.py"
    flags = [
        {n.attr for n in ast.walk(function(release, path, "MegatronOptimizer", name)) if isinstance(n, ast.Attribute)}
        for name in ("get_main_grads_for_grad_norm", "clip_grad_norm", "count_zeros")
    ]
    norm, clipping, counting = ({f for f in found if f.startswith("use_precision_aware")} for found in flags)
    assert norm
    assert norm == clipping == counting


@each_release
def test_the_tracker_of_auxiliary_losses_can_be_made_on_a_stage_without_experts(release: str) -> None:
    folder = fetch(release, MATRIX) / CORE / "transformer" / "moe"
    assert any("force_initialize" in path.read_text("utf-8") for path in folder.glob("*.py"))


@each_release
def test_gathered_parameters_of_the_layer_wise_optimizer_have_their_own_memory_or_the_idle_gradients(
    release: str,
) -> None:
    text = (fetch(release, MATRIX) / CORE / "distributed" / "param_and_grad_buffer.py").read_text("utf-8")
    assert ("layerwise_gather_list" in text) == at_least(release, "0.17.0")
    assert ("_layerwise_src_buffer = flat_local_params" in text) == (
        at_least(release, "0.17.0") and not at_least(release, "0.18.0")
    )
    assert ("reuse_buf = bucket.grad_data.view(param_dtype)" in text) == at_least(release, "0.18.0")


@each_release
def test_the_softmax_offset_of_transformer_engine_is_there_from_0_15_on(release: str) -> None:
    text = (fetch(release, MATRIX) / CORE / "extensions" / "transformer_engine.py").read_text("utf-8")
    assert ("'softmax_offset'" in text or '"softmax_offset"' in text) == at_least(release, "0.15.0")


@each_release
def test_backward_of_overlapped_shared_experts_waits_for_its_stream_from_0_18_on(release: str) -> None:
    text = (fetch(release, MATRIX) / CORE / "transformer" / "moe" / "shared_experts.py").read_text("utf-8")
    assert ("_BackwardStreamWait.apply(" in text) == at_least(release, "0.18.0")
