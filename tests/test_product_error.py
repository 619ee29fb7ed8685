"""The rule of method="product_error": against a slow reference, and its properties inside the controller."""

import itertools
import math

import numpy as np
import pytest
import torch
from conftest import Fault, Net, Paths, Saturating, batches, trainer
from hypothesis import given, settings
from hypothesis import strategies as st

from gnmr_lightning import GNMRCallback, GNMRConfig, GNMRController, GNMRPrecision, backends
from gnmr_lightning.product_error import ErrorRise

INF, NAN = math.inf, math.nan
quick = settings(max_examples=60, deadline=None)


def f64(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def reference(history: list[list[float]], threshold, floor, decay) -> list[tuple[float, float]]:
    """Risk and rise of one unit, step by step, from all that was admitted, product by product."""
    admitted = [[], [], []]
    squares = [[], [], []]
    out = []
    for errors in history:
        risks, rises = [0.0], [0.0]
        for k, e in enumerate(errors):
            weights = [decay**age for age in range(len(admitted[k]))][::-1]
            total = sum(weights)
            mean = sum(w * a for w, a in zip(weights, admitted[k], strict=True)) / total if total else NAN
            spread = math.sqrt(sum(w * s for w, s in zip(weights, squares[k], strict=True)) / total) if total else NAN
            ratio = threshold if threshold != "auto" else min(max(1 + 10 * spread, 2.0), 8.0)
            if math.isnan(e):
                continue
            if e == INF:
                risks.append(INF)
                rises.append(INF)
                continue
            if not admitted[k]:
                admitted[k].append(e)
                squares[k].append(0.0)
                continue
            risks.append(e / max(ratio * mean, floor * (1 if k == 0 else 5)))
            rises.append(e / mean)
            take = ratio * mean if risks[-1] > 1 else e
            admitted[k].append(take)
            squares[k].append((take / mean - 1) ** 2)
        out.append((max(risks), max(rises)))
    return out


errors = st.one_of(st.floats(1e-3, 3.0), st.sampled_from([NAN, INF, 0.05, 0.9, 1.0]))


def judge(rule: ErrorRise, errors: list[float]):
    with np.errstate(all="ignore"):
        return rule.update(np.array(errors)[:, None], np.array([True]))


@quick
@given(
    history=st.lists(st.lists(errors, min_size=3, max_size=3), min_size=1, max_size=40),
    threshold=st.sampled_from(["auto", 3.0]),
    decay=st.sampled_from([0.9, 0.98]),
)
def test_risk_and_rise_equal_a_slow_reference(history, threshold, decay):
    rule = ErrorRise(1, threshold, 0.1, decay)
    for row, (risk, rise) in zip(history, reference(history, threshold, 0.1, decay), strict=True):
        ours = judge(rule, row)
        assert ours[0].item() == pytest.approx(risk, rel=1e-9)
        assert ours[1].item() == pytest.approx(rise, rel=1e-9)


def controller(n_units=3, **policy) -> GNMRController:
    return GNMRController(GNMRConfig(**{"warmup_steps": 5, "lock_interval": 4, "max_o": 1, **policy}), n_units)


HEALTHY = f64(*[[0.01, 0.03, 0.03]] * 3)
NORMS = torch.ones(3, dtype=torch.float64)


def feed(control: GNMRController, steps: int, errors=HEALTHY, **kwargs):
    return [control.update(NORMS, errors=errors, **kwargs) for _ in range(steps)][-1]


def sick(unit: int, product: int = 0, error: float = 0.8):
    errors = HEALTHY.clone()
    errors[unit, product] = error
    return errors


def test_the_unit_whose_product_error_rose_is_locked_whatever_the_norms_do():
    control = controller()
    feed(control, 10)
    norms = torch.tensor([50.0, 1.0, 1.0], dtype=torch.float64)
    assert not control.update(norms, errors=HEALTHY).locked.any()
    decision = control.update(NORMS, errors=sick(1))
    assert decision.newly_locked.tolist() == [False, True, False]
    assert decision.rise[1].item() == pytest.approx(80)
    assert decision.risk[1].item() == pytest.approx(8)  # 0.8 by the floor of 0.1


@pytest.mark.parametrize(
    ("product", "error", "found"), [(0, 0.09, False), (0, 0.11, True), (1, 0.49, False), (2, 0.51, True)]
)
def test_errors_below_the_floor_are_no_risk(product, error, found):
    control = controller()
    feed(control, 10)
    assert feed(control, 1, sick(2, product, error)).locked.tolist() == [False, False, found]


def test_a_coarse_format_is_no_fault_and_a_lasting_change_is_learnt():
    control = controller()
    coarse = f64(*[[0.5, 0.9, 0.9]] * 3)
    assert not any(control.update(NORMS, errors=coarse).locked.any() for _ in range(50))
    # But there the norm says when that does harm; a unit whose products are fine is none the worse for its norm.
    spike = torch.tensor([1.0, 9.0, 1.0], dtype=torch.float64)
    assert control.update(spike, errors=coarse).locked.tolist() == [False, True, False]
    fine = controller()
    feed(fine, 50)
    assert not fine.update(spike, errors=HEALTHY).locked.any()
    rule = ErrorRise(1, "auto", 0.1, 0.98)
    for _ in range(20):
        judge(rule, [0.05, 0.05, 0.05])
    risks = [judge(rule, [0.9, 0.05, 0.05])[0].item() for _ in range(300)]
    assert risks[0] > 8
    assert risks[-1] < 1


def test_a_unit_that_is_still_sick_when_its_lock_ends_is_locked_again_and_learns_nothing_meanwhile():
    control = controller()
    feed(control, 10)
    feed(control, 1, sick(0))
    learnt = control._errors.errors_3U[:, 0].copy()
    for _ in range(3):
        for _ in range(3):
            assert not feed(control, 1, sick(0)).released.any()
        again = feed(control, 1, sick(0))
        assert again.released.tolist() == again.newly_locked.tolist() == [True, False, False]
        assert (control._errors.errors_3U[:, 0] == learnt).all()
    assert feed(control, 4).released.tolist() == [True, False, False]
    assert not control.locked.any()


def test_a_sicker_unit_takes_the_place_of_one_whose_lock_ends():
    control = controller()
    feed(control, 10)
    feed(control, 1, sick(0, error=0.5))
    feed(control, 3, sick(0, error=0.5))
    both = sick(0, error=0.5)
    both[2, 0] = 0.9
    assert feed(control, 1, both).locked.tolist() == [False, False, True]


def test_where_a_value_stopped_being_finite_is_locked_first_and_else_the_last_unit():
    norms = torch.full((3,), INF, dtype=torch.float64)
    for began, expected in (([1, 0, 0], 0), ([0, 1, 0], 1), ([1, 1, 0], 1), ([0, 0, 0], 2)):
        control = controller()
        feed(control, 10)
        decision = control.update(norms, errors=HEALTHY, began=torch.tensor(began, dtype=torch.bool))
        assert decision.newly_locked.nonzero().tolist() == [[expected]]
    control = controller()
    feed(control, 10)
    # The gradients stayed finite, as behind a saturating function, but a product did not.
    assert feed(control, 1, sick(1, 0, INF)).newly_locked.tolist() == [False, True, False]


@quick
@given(st.lists(st.lists(st.lists(errors, min_size=3, max_size=3), min_size=6, max_size=6), max_size=40), st.randoms())
def test_budget_relabelling_and_resume(history, rng):
    policy = GNMRConfig(warmup_steps=2, lock_interval=3, max_o=2)
    a, b, c = (GNMRController(policy, 6) for _ in range(3))
    order = list(range(6))
    rng.shuffle(order)
    norms = torch.ones(6, dtype=torch.float64)
    for number, rows in enumerate(history):
        # Ties between units go by index, so relabelling is checked on errors that differ.
        e = f64(*rows) * torch.linspace(1, 1.01, 6, dtype=torch.float64)[:, None]
        x, y = a.update(norms, errors=e), b.update(norms, errors=e[order])
        infinite = (e == INF).any(1)
        assert int(x.locked.sum()) <= 2
        assert not x.risk.isnan().any()
        torch.testing.assert_close(x.risk[order], y.risk, rtol=0, atol=0)
        if number < 2 or infinite.sum() == 0:
            z = c.update(norms, errors=e)
            assert torch.equal(z.locked, x.locked)
        else:
            c.load_state_dict(a.state_dict())
        if infinite.sum() > 1:
            break
        assert torch.equal(x.locked[order], y.locked)
        resumed = GNMRController(policy, 6)
        resumed.load_state_dict(a.state_dict())
        assert torch.equal(resumed.locked, a.locked)
        a = resumed


def test_units_that_do_not_step_learn_nothing():
    control = controller()
    stepping = torch.tensor([True, False, True])
    before = {k: v.clone() for k, v in control._tensors().items()}
    feed(control, 3, sick(1), stepping=stepping)
    for name, tensor in control._tensors().items():
        assert torch.equal(tensor[..., 1], before[name][..., 1]), name


def test_errors_are_asked_for_and_checked():
    with pytest.raises(ValueError, match="method='gnmr'"):
        controller().update(NORMS)
    with pytest.raises(ValueError, match="three floating-point errors"):
        controller().update(NORMS, errors=torch.zeros(3))
    for bad in ({"method": "median"}, {"error_threshold": 1.0}, {"error_threshold": "high"}, {"error_floor": 1.5}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            GNMRConfig(**bad)
    with pytest.raises(ValueError, match="method="):
        controller().load_state_dict(controller(method="gnmr").state_dict())


def test_the_state_has_a_fixed_size_of_177_bytes_a_unit():
    control = GNMRController(GNMRConfig(), 100)
    sizes = set()
    for _ in range(3):
        control.update(torch.ones(100), errors=torch.full((100, 3), 0.01))
        sizes.add(control.nbytes)
    assert sizes == {17700}


class SaturatedInput(Fault):
    kind = "input"

    def on_train_start(self, trainer, pl_module):
        layer = pl_module.get_submodule(self.fqn)
        self.backend = Saturating(backends.get(layer.backend), self.kind)
        layer.backend = backends.register(self.backend).name


class NanInput(SaturatedInput):
    kind = "nan"


RECIPES = ["int8", "float8_tensorwise", "float8_rowwise", "float8_rowwise_with_gw_hp", "float8_blockwise"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("fqn", ["net.0", "net.4"])
def test_in_a_run_the_unit_with_a_saturated_operand_is_found_at_once(recipe, fqn):
    control = GNMRConfig(warmup_steps=5, lock_interval=6, max_o=1)
    paths, callback = Paths(), GNMRCallback()
    run = trainer(GNMRPrecision(recipe, control=control), callbacks=[callback, SaturatedInput(fqn, [12]), paths])
    run.fit(Net(), batches(24))
    assert paths.bf16 == [{fqn} if 13 <= step <= 18 else set() for step in range(24)]
    assert callback.events[0].rise > 5
    assert callback.totals()["max_error_rise"] == pytest.approx(callback.events[0].rise, rel=1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_lock_lasts_as_long_as_the_fault(recipe):
    control = GNMRConfig(warmup_steps=5, lock_interval=4, max_o=1)
    paths, callback = Paths(), GNMRCallback()
    faults = SaturatedInput("net.2", range(10, 24))
    trainer(GNMRPrecision(recipe, control=control), callbacks=[callback, faults, paths]).fit(Net(), batches(40))
    # Sick from 10 to 23: found in 10, tried in 14, 18 and 22 while it is sick, and well when it is tried in 26.
    assert paths.bf16 == [{"net.2"} if 11 <= step <= 26 else set() for step in range(40)]
    assert [event[:3] for event in callback.events] == [
        (10, "net.2", "locked"),
        *((step, "net.2", "renewed") for step in (14, 18, 22)),
        (26, "net.2", "released"),
    ]
    assert callback.totals()["interventions"] == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_a_nan_is_found_where_it_began(compiled, caplog):
    control = GNMRConfig(warmup_steps=5, lock_interval=6, max_o=1)
    paths, callback = Paths(), GNMRCallback()
    run = trainer(GNMRPrecision("int8", control=control), callbacks=[callback, NanInput("net.2", [12]), paths])
    model = Net()
    if compiled:
        model.net.compile(backend="aot_eager", fullgraph=True)
    with caplog.at_level("WARNING", "gnmr_lightning"):
        run.fit(model, batches(24))
    assert [event[:3] for event in callback.events] == [(12, "net.2", "locked"), (18, "net.2", "released")]
    assert "step 12: a gradient is not finite (began in net.2 and reached 3 units)" in caplog.text
    assert all(p.isfinite().all() for p in model.parameters())


def test_the_plain_rule_costs_no_probe():
    plugin = GNMRPrecision("int8", control=GNMRConfig(method="gnmr"))
    model = Net()
    plugin.convert_module(model)
    assert {len(linear.probes) for unit in plugin.units for linear in unit.linears.values()} == {0}


def test_units_take_turns_in_being_probed():
    control = controller(lock_interval=4, probe_interval=3)
    assert control.probed.all()
    asked = torch.stack([feed(control, 1).probed for _ in range(32)])
    assert asked[:19].all()  # the first 20 steps of a unit, the first of which nobody had to ask for
    for unit in range(3):
        steps = asked[19:, unit].nonzero().flatten()
        assert steps.diff().tolist() == [3] * (len(steps) - 1)
    assert asked[19:].sum(1).tolist() == [1] * 13
    # A locked unit is probed in the last step of its lock, and then its turn comes as before.
    decisions = [feed(control, 1, sick(1)), *(feed(control, 1) for _ in range(5))]
    assert [d.locked[1].item() for d in decisions] == [True] * 4 + [False] * 2
    assert [d.probed[1].item() for d in decisions[:4]] == [False, False, False, True]
    everyone = controller(probe_interval=1)
    assert all(feed(everyone, 1).probed.all() for _ in range(40))
    assert not controller(method="gnmr").probed.any()


def test_after_a_gradient_that_is_not_finite_all_units_are_probed_before_one_is_blamed():
    control = controller(max_o=2)
    feed(control, 30)
    assert control.probed.sum() == 1
    unknown = torch.full((3, 3), NAN, dtype=torch.float64)
    everywhere, to_1 = f64(INF, INF, INF), f64(INF, INF, 1)
    # Backward reached units 1 and 0 and not 2: it began in 1, and no probe is needed to say so.
    decision = control.update(to_1, errors=unknown)
    assert decision.risk.tolist() == [0, INF, 0]
    assert decision.newly_locked.tolist() == [False, True, False]
    assert decision.probed.all()
    # It did not help: 1 ran bf16, so the next one back is tried.
    assert control.update(to_1, errors=unknown).newly_locked.tolist() == [True, False, False]
    assert not control.update(to_1, errors=unknown).newly_locked.any()  # both ran bf16: it is none of them
    control = controller(max_o=2)
    feed(control, 30)
    # Every unit is reached: a product of the forward, anywhere.
    decision = control.update(everywhere, errors=unknown)
    assert not decision.locked.any()
    assert decision.nonfinite.all()
    assert decision.probed.all()
    resumed = controller(max_o=2)
    resumed.load_state_dict(control.state_dict())
    for control_ in (control, resumed):
        decision = control_.update(everywhere, errors=HEALTHY, began=torch.tensor([False, True, False]))
        assert decision.newly_locked.tolist() == [False, True, False]
    # All were probed and it began in none of them: the nearest to it is the last.
    control = controller(max_o=2)
    feed(control, 10)
    assert control.update(everywhere, errors=HEALTHY).newly_locked.tolist() == [False, False, True]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_probes_the_units_whose_turn_it_is(compiled):
    control = GNMRConfig(probe_interval=4, lock_interval=5, max_o=1)
    seen = []

    class Look(Paths):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            measured = trainer.precision_plugin.measure(optimizer).errors.isfinite().any(1)
            seen.append(measured.tolist())

    paths, callback = Look(), GNMRCallback()
    model = Net()
    if compiled:
        model.net.compile(backend="aot_eager", fullgraph=True)
    # Sick from 30 to 33: found in its next turn, and well again in the last step of its lock.
    faults = SaturatedInput("net.2", range(30, 34))
    run = trainer(GNMRPrecision("int8", control=control), callbacks=[paths, callback, faults])
    run.fit(model, batches(44))
    assert all(all(row) for row in seen[:20])
    found = callback.events[0].step
    assert [event[:3] for event in callback.events] == [(found, "net.2", "locked"), (found + 5, "net.2", "released")]
    assert 30 <= found <= 33
    for unit in range(3):
        turns = [step for step in range(20, 44) if seen[step][unit]]
        free = [step for step in turns if unit != 1 or not found < step <= found + 5]
        assert {b - a for a, b in itertools.pairwise(free)} <= {4, 8}
        assert unit != 1 or [step for step in turns if found < step <= found + 5] == [found + 5]
