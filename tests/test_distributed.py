"""Two real processes over gloo: DDP and FSDP2 agree on every rank, and equal one process on the same global batches."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from distributed_worker import CLIP, FAULT_STEP, SCENARIOS, STEPS, train

WORKER = Path(__file__).parent / "distributed_worker.py"
TIMEOUT_S = 60
ERRORS = ["ddp-product_error", "fsdp2-product_error"]
SPIKES = ["ddp-int8", "fsdp2-int8", "fsdp2-float8_rowwise"]
UNITS = ["net.0", "net.2", "net.4"]


def run_ranks(folder: Path, command: Sequence[str], timeout_s: float = TIMEOUT_S) -> None:
    """Runs `python command` as ranks 0 and 1, logs in `folder`; whatever happens, neither is left behind."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "0", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join(map(str, (WORKER.parent, WORKER.parent.parent)))
    env = os.environ | common | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    logs = [folder / f"{rank}.log" for rank in (0, 1)]
    ranks: list[subprocess.Popen] = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as out:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-W", "ignore", *command],
                        env=env | {"LOCAL_RANK": str(rank)},
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        deadline = time.monotonic() + timeout_s
        # One that fails leaves the other waiting in a collective, so the first failure ends both.
        while any(p.poll() is None for p in ranks) and not any(p.poll() for p in ranks):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        codes = [p.poll() for p in ranks]
    finally:
        for p in ranks:
            if p.poll() is None:
                os.killpg(p.pid, signal.SIGKILL)
            p.wait()
    tails = "\n".join(f"-- rank {rank}\n{log.read_text()[-3000:]}" for rank, log in enumerate(logs))
    assert codes == [0, 0], f"exit codes {codes} within {timeout_s} s\n{tails}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Scenario -> what each of its two ranks saw."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(folder, [str(WORKER), str(folder)])
    found = {s: [torch.load(folder / f"{s}-{rank}.pt", weights_only=True) for rank in (0, 1)] for s in SCENARIOS}
    assert all([r["rank"] for r in ranks] == [0, 1] and {r["world"] for r in ranks} == {2} for ranks in found.values())
    return found


@pytest.fixture(scope="module")
def single():
    """The run of "clip" in one process."""
    torch.set_num_threads(1)
    return train("single", "exact", None)


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_all_ranks_take_the_same_decisions_from_the_same_state(runs, scenario):
    one, two = runs[scenario]
    assert one["locked"] == two["locked"]
    assert len(one["state"]) == len(two["state"]) == STEPS
    assert [same(a, b) for a, b in zip(one["state"], two["state"], strict=True)] == [True] * STEPS
    assert not any(same(a, b) for a, b in zip(one["state"], one["state"][1:], strict=False))  # it is not one state
    torch.testing.assert_close(one["norms"], two["norms"], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scenario", SPIKES)
def test_what_one_rank_alone_has_wrong_is_recovered_on_both(runs, scenario):
    """Rank 1's part of one gradient is 1,000 times too large in step 3: bf16 in steps 4, 5 and 6, on both ranks."""
    for record in runs[scenario]:
        before, at = (record["norms"][step][1] for step in (FAULT_STEP - 1, FAULT_STEP))
        assert at > 20 * before
        recovered_as_it_should_be(record)


def recovered_as_it_should_be(record) -> None:
    locked = range(FAULT_STEP, FAULT_STEP + 3)
    assert record["locked"] == [[False, step in locked, False] for step in range(STEPS)]
    assert record["bf16"] == [["net.2"] if step - 1 in locked else [] for step in range(STEPS)]
    assert record["moved"] == [True] * STEPS


@pytest.mark.parametrize("scenario", ERRORS)
def test_a_product_that_is_wrong_on_one_rank_alone_is_recovered_on_both(runs, scenario):
    for record in runs[scenario]:
        recovered_as_it_should_be(record)


def test_a_gradient_not_finite_in_one_shard_skips_the_step_on_both_ranks(runs):
    for record in runs["fsdp2-nan"]:
        finite = [step != FAULT_STEP for step in range(STEPS)]
        assert torch.tensor(record["totals"]).isfinite().tolist() == finite
        assert record["moved"] == finite
        assert torch.tensor(record["norms"][FAULT_STEP]).isfinite().tolist() == [True, False, True]
        assert record["locked"][FAULT_STEP] == [False, True, False]
        assert record["bf16"][FAULT_STEP + 1 : FAULT_STEP + 4] == [["net.2"]] * 3
        assert all(bool(w.isfinite().all()) for w in record["weights"])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_layers_stay_the_same_objects_and_get_their_class_back(runs, scenario):
    plain = "FSDPLinear" if scenario.startswith("fsdp2") else "Linear"
    converted = {"FSDPLinear": "RecoverableFSDPLinear", "Linear": "RecoverableLinear"}[plain]
    head = converted if scenario.endswith("clip") else plain
    for record in runs[scenario]:
        assert record["classes"] == [converted] * 3 + [head]
        assert record["classes_after"] == [plain] * 4
        assert record["kept"] == [True, True]  # modules and parameters, after conversion and after the run


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_step_costs_one_measurement_with_a_collective_for_shards_and_one_for_product_errors(runs, scenario):
    # As many entries as steps: clipping measures no second time.
    expected = [scenario.startswith("fsdp2") + (scenario in ERRORS)] * STEPS
    for record in runs[scenario]:
        assert record["all_reduces"] == expected
        assert record["collectives"] == expected


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_norms_are_those_of_the_whole_gradients(runs, scenario):
    for record in runs[scenario]:
        measured = [[*norms, total] for norms, total in zip(record["norms"], record["totals"], strict=True)]
        torch.testing.assert_close(measured, record["oracle"], rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("scenario", ["ddp-clip", "fsdp2-clip"])
def test_norms_and_clipping_equal_those_of_one_process(runs, single, scenario):
    """Case 8: clipped by the true global norm."""
    totals = single["totals"]
    assert single["world"] == 1
    assert 2 <= sum(total > CLIP for total in totals) <= STEPS - 2, totals
    clipped = [total * min(1, CLIP / (total + 1e-6)) for total in totals]  # as torch.nn.utils.clip_grad_norm_
    assert single["stepped_with"] == pytest.approx(clipped, rel=1e-6)
    for record in runs[scenario]:
        torch.testing.assert_close(record["norms"], single["norms"], rtol=1e-5, atol=0)
        assert record["totals"] == pytest.approx(totals, rel=1e-5)
        assert record["stepped_with"] == pytest.approx(single["stepped_with"], rel=1e-5)
        torch.testing.assert_close(record["weights"], single["weights"], rtol=1e-5, atol=1e-6)
