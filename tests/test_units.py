"""How models are cut into units, and that nothing is left out without a reason."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from gnmr_lightning.linear import RecoverableLinear, make_recoverable
from gnmr_lightning.units import cut


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)


class GPT(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.unembed = nn.Linear(8, 32, bias=False)
        if tied:
            self.unembed.weight = self.embed.weight


def names(model, **kwargs):
    units, skipped = cut(model, **kwargs)
    return [unit.name for unit in units], {s.fqn: s.reason for s in skipped}


BLOCKS = [f"blocks.{i}.{name}" for i in range(3) for name in ("up", "down")]


def test_linear_units_come_in_the_models_order_without_the_head():
    units, skipped = names(GPT())
    assert units == ["stem", *BLOCKS]
    assert skipped == {"unembed": "the last linear layer, taken for the output head: include=['*'] takes it too"}


def test_block_units_hold_the_linears_of_each_element():
    units, _ = cut(GPT(), granularity="block")
    assert {unit.name: unit.fqns for unit in units} == {
        "stem": ["stem"],
        **{f"blocks.{i}": [f"blocks.{i}.up", f"blocks.{i}.down"] for i in range(3)},
    }


def test_only_the_outermost_repeated_list_makes_blocks():
    outer = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList(Block() for _ in range(2))}) for _ in range(2))
    units, _ = cut(nn.ModuleDict({"layers": outer, "head": nn.Linear(8, 2)}), granularity="block")
    assert [unit.name for unit in units] == ["layers.0", "layers.1"]
    assert len(units[0].linears) == 4
    # a list of one element is not repeated, and one of bare linears has no blocks
    plain = nn.ModuleDict({"one": nn.ModuleList([Block()]), "flat": nn.ModuleList(nn.Linear(2, 2) for _ in range(2))})
    assert names(plain, granularity="block", include=["*"])[0] == ["one.0.up", "one.0.down", "flat.0", "flat.1"]


def test_a_sequential_is_cut_by_index():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 2))
    assert names(model)[0] == ["0", "2.0", "2.1"]
    assert list(names(model)[1]) == ["3"]
    assert names(model, granularity="block")[0] == ["0", "2.0", "2.1"]  # only a ModuleList has blocks


HEADS = ["lm_head", "head", "output", "classifier", "score", "embed_out", "fc_out", "output_projection"]


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_known_by_its_name_wherever_it_stands(name):
    model = nn.ModuleDict({name: nn.Linear(8, 8), "last": nn.Linear(8, 8)})
    assert names(model) == (["last"], {name: "the output head"})
    assert names(nn.ModuleDict({"model": model})) == (["model.last"], {f"model.{name}": "the output head"})


def test_two_parametrized_layers_are_not_taken_for_tied():
    """Their weights are made at each access; freed, one's id may be the next one's."""
    for _ in range(20):  # which id comes back depends on the allocator: without the fix, about one in three did
        layers = {"embed": nn.Embedding(8, 8), "a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}
        model = nn.ModuleDict({name: parametrizations.weight_norm(layer) for name, layer in layers.items()})
        model["head"] = nn.Linear(8, 2)
        assert names(model) == (["a", "b"], {"head": "the output head"})


def test_a_head_is_known_by_tying_or_by_the_model_itself():
    assert names(GPT(tied=True))[1] == {"unembed": "tied to an embedding, so the output head"}
    model = GPT()
    model.get_output_embeddings = lambda: model.stem
    assert names(model)[1] == {"stem": "the output head"}


def test_include_takes_exactly_what_it_matches_the_head_too():
    assert names(GPT(), include=["blocks.*.up", "unembed"])[0] == [
        "blocks.0.up",
        "blocks.1.up",
        "blocks.2.up",
        "unembed",
    ]
    units, skipped = names(GPT(), include=["*"], exclude=["blocks.1.*"])
    assert units == ["stem", "blocks.0.up", "blocks.0.down", "blocks.2.up", "blocks.2.down", "unembed"]
    # the order is the model's, not that of the patterns; exclude wins; patterns are sensitive to case
    assert names(GPT(), include=["unembed", "blocks.?.up", "stem"], exclude=["blocks.0.up"])[0] == [
        "stem",
        "blocks.1.up",
        "blocks.2.up",
        "unembed",
    ]
    with pytest.raises(ValueError, match="the pattern 'Stem' matches no linear layer"):
        cut(GPT(), include=["stem", "Stem"])
    assert skipped == {"blocks.1.up": "matches exclude", "blocks.1.down": "matches exclude"}


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_is_an_error_with_near_names(argument):
    with pytest.raises(ValueError, match=r"the pattern 'blocks\.0\.upp' matches no linear layer.*blocks\.0\.up\b"):
        cut(GPT(), **{argument: ["blocks.0.upp"]})
    with pytest.raises(ValueError, match=r"the pattern 'embed' matches no linear layer; the nearest names are unembed"):
        cut(GPT(), **{argument: ["*", "embed"]})  # it is a module, but no linear one
    with pytest.raises(ValueError, match=rf"{argument}='stem' is one string: write a list of patterns, \['stem'\]"):
        cut(GPT(), **{argument: "stem"})


def test_no_unit_at_all_is_an_error_that_says_why():
    with pytest.raises(ValueError, match=r"no linear layer is left.*\(0: the last linear layer.*name some in include"):
        cut(nn.Sequential(nn.Linear(4, 4)))
    attention = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "lazy": nn.LazyLinear(4), "head": Block()})
    with pytest.raises(ValueError, match="no linear layer is left") as error:
        cut(attention, exclude=["head.*"])
    for reason in (
        "attention.out_proj: nn.MultiheadAttention reads its weight and never calls it",
        "lazy: a lazy layer whose sizes are not known yet",
        "head.up: matches exclude",
        "head.down: matches exclude",
    ):
        assert reason in str(error.value)
    with pytest.raises(
        ValueError, match=r"stem: matches no include pattern; blocks\.0\.up: matches no include pattern"
    ):
        cut(GPT(), include=[])
    with pytest.raises(ValueError, match=r"the model has no nn\.Linear"):
        cut(nn.Sequential(nn.ReLU()))
    with pytest.raises(ValueError, match="granularity='layer' is not known: write 'linear' or 'block'"):
        cut(GPT(), granularity="layer")


def test_layers_that_are_not_called_as_a_linear_are_skipped():
    class Own(nn.Linear):
        def forward(self, x):
            return x

    class Inherits(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "own": Own(4, 4),
            "inherits": Inherits(4, 4),
            "patched": nn.Linear(4, 4),
            "lazy": nn.LazyLinear(4),
            "attention": nn.MultiheadAttention(8, 2),
            "normed": parametrizations.weight_norm(nn.Linear(4, 4)),
            "head": nn.Linear(4, 4),
        }
    )
    model["patched"].forward = lambda x: x
    units, skipped = names(model)
    assert units == ["inherits", "normed"]
    assert skipped == {
        "own": "Own has a forward of its own",
        "patched": "Linear has a forward of its own",
        "lazy": "a lazy layer whose sizes are not known yet: run one batch through the model first",
        "attention.out_proj": "nn.MultiheadAttention reads its weight and never calls it",
        "head": "the output head",
    }


def test_a_layer_that_torchao_converted_already_is_skipped():
    from torchao.float8 import convert_to_float8_training

    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    with pytest.raises(ValueError, match="Float8Linear has a forward of its own"):
        cut(model, include=["0"])


def test_the_backends_rule_is_a_reason():
    units, skipped = names(
        GPT(), refuses_layer=lambda fqn, m: f"in_features={m.in_features}" if m.in_features == 16 else None
    )
    assert units == ["stem", "blocks.0.up", "blocks.1.up", "blocks.2.up"]
    assert skipped["blocks.0.down"] == "in_features=16"


def test_a_layer_in_two_places_is_one_unit():
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": shared, "head": nn.Linear(4, 2)})
    assert names(model)[0] == ["a"]
    blocks = nn.ModuleList(Block() for _ in range(2))
    blocks[1].up = blocks[0].up
    units, _ = cut(nn.ModuleDict({"blocks": blocks, "head": nn.Linear(8, 2)}), granularity="block")
    assert [unit.fqns for unit in units] == [["blocks.0.up", "blocks.0.down"], ["blocks.1.down"]]


def test_a_lazy_layer_is_a_plain_one_after_its_first_batch():
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="0: a lazy layer whose sizes are not known yet"):
        cut(model)
    model(torch.zeros(1, 3))
    assert names(model)[0] == ["0"]


def test_cutting_changes_nothing_and_a_converted_model_is_cut_alike():
    model = GPT()
    modules = dict(model.named_modules())
    units, skipped = cut(model)
    assert dict(model.named_modules()) == modules
    assert {type(linear) for unit in units for linear in unit.linears.values()} == {nn.Linear}
    assert all(modules[fqn] is linear for unit in units for fqn, linear in unit.linears.items())
    for unit in units:
        for linear in unit.linears.values():
            make_recoverable(linear, *torch.zeros(2, dtype=torch.bool), "int8")
    assert cut(model) == (units, skipped)
    assert isinstance(units[0].linears["stem"], RecoverableLinear)


def test_transformer_encoder_layers_are_taken_but_for_out_proj():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    units, skipped = names(encoder, include=["*"])
    assert units == [f"layers.{i}.linear{j}" for i in range(2) for j in (1, 2)]
    assert set(skipped) == {f"layers.{i}.self_attn.out_proj" for i in range(2)}
    # without a head of its own, its last layer is taken for one
    assert names(encoder)[0] == units[:-1]
    blocks, _ = cut(encoder, granularity="block", include=["*"])
    assert [unit.fqns for unit in blocks] == [[f"layers.{i}.linear{j}" for j in (1, 2)] for i in range(2)]
    # out_proj is never called, whoever asks for it
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.out_proj: nn\.MultiheadAttention reads its weight"):
        cut(encoder, include=["layers.0.self_attn.out_proj"])


def test_recipes_patterns_take_exactly_what_they_match_the_head_too():
    units, skipped = names(GPT(), recipes=["*.up", "unembed"], exclude=["blocks.1.*"])
    assert units == ["blocks.0.up", "blocks.2.up", "unembed"]
    assert skipped["stem"] == skipped["blocks.0.down"] == "matches no recipe's pattern"
    assert skipped["blocks.1.up"] == "matches exclude"
    units, skipped = names(GPT(), recipes=["blocks.*"], include=["*.up"])
    assert units == ["blocks.0.up", "blocks.1.up", "blocks.2.up"]
    assert skipped["blocks.0.down"] == "matches no include pattern"


@pytest.mark.parametrize(
    ("recipes", "message"),
    [
        (["*.up", "*.upp"], r"the pattern '\*\.upp' matches no linear layer; the nearest names are"),
        (["blocks.*", "*.up"], r"the recipe of '\*\.up' is for no layer: the first match wins.*so put it before them"),
    ],
)
def test_a_recipes_pattern_without_a_layer_is_an_error(recipes, message):
    with pytest.raises(ValueError, match=message):
        cut(GPT(), recipes=recipes)
