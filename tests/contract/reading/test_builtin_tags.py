"""Tags of TensorBoard's dashboards are matched to layers by name."""

from __future__ import annotations

from dataclasses import replace

from telemetry.events.page_format import loss_tag
from telemetry.reading.builtin_tags import cost_curves, histogram_tags, image_tags, scalar_curves
from telemetry.reading.sessions import Layer
from telemetry.reading.sources import FileSource
from telemetry.records import Parameter

LAYER = Layer(
    name="encoder.1",
    type_name="LSTM",
    parameters=(Parameter(name="encoder.1.weight", module_name="encoder.1", shape=(2,)),),
    places=frozenset({3}),
)
MODEL = Layer(name="", type_name="Net", parameters=(), places=frozenset({0}))


def test_histograms_of_outputs_come_before_those_of_parameters() -> None:
    tags = [
        "grad/0003.encoder.1.weight",
        "activation_grad/0003.encoder.1",
        "activation/0003.encoder.1[0]",
        "weight/0003.encoder.1.weight",
        "activation/0013.encoder.11",
        "activation/0003.encoder.1.inner",
        "validation/activation/0003.encoder.1",
    ]
    found = histogram_tags(LAYER, tags)
    assert [tag for _, _, tag in found] == [tags[2], tags[1], tags[0], tags[3]]


def test_a_layer_that_is_called_like_an_output_of_another_is_not_taken_for_it() -> None:
    first, second = "activation/0003.encoder.1[1]", "activation/0004.encoder.1[1]"
    other = replace(LAYER, name="encoder.1[1]", parameters=(), places=frozenset({4}))
    assert [tag for _, _, tag in histogram_tags(LAYER, [first, second])] == [first]
    assert [tag for _, _, tag in histogram_tags(other, [first, second])] == [second]


def test_tags_of_layers_with_unprintable_names_are_found() -> None:
    layer = replace(LAYER, name="a\nb")
    tags = ["activation/0003.a\\nb", "activation/0003.a\\nb[1]"]
    assert len(histogram_tags(layer, tags)) == 2


def test_tags_of_the_model_itself_have_the_name_of_its_class() -> None:
    assert histogram_tags(MODEL, ["activation/0000.Net"]) != []
    assert histogram_tags(MODEL, ["activation/0001.encoder.1"]) == []


def test_pictures_are_found_by_name() -> None:
    tags = ["feature_maps/0003.encoder.1", "filters/0003.encoder.1", "input", "x"]
    assert [tag for _, _, tag in image_tags(LAYER, tags)] == tags[:3]
    assert image_tags(LAYER, tags[2:]) == []


class Tags(FileSource):
    """Source that has tags only."""

    def __init__(self, tags: list[str], chosen: str | None = None) -> None:
        self._tags, self._chosen = tags, chosen

    def tags(self, plugin_name: str) -> dict[str, int]:
        if plugin_name == "scalars":
            return dict.fromkeys(self._tags, 0)
        return {} if self._chosen is None else {loss_tag("20260101-000000", self._chosen): 0}


def test_the_loss_and_the_learning_rates_are_shown() -> None:
    tags = ["train/loss", "loss", "ce", "learning_rate/0", "learning_rate/1", "blossom"]
    rates = [("learning rate", "learning_rate/0"), ("learning rate", "learning_rate/1")]
    assert scalar_curves(Tags(tags)) == [("loss", "loss"), *rates]
    assert scalar_curves(Tags(tags, chosen="ce")) == [("loss", "ce"), *rates]
    assert scalar_curves(Tags(tags, chosen="gone")) == [("loss", "loss"), *rates]
    assert scalar_curves(Tags(["blossom", "val_loss"])) == []


def test_times_are_shown_if_all_are_known() -> None:
    times = [f"~run/time/{part}_s" for part in ("data_wait", "forward", "backward", "optimizer")]
    memory = "~run/memory/host_rss_bytes"
    expected = [*(("time", tag) for tag in times), ("memory", memory)]
    assert cost_curves(Tags([memory, *reversed(times), "~run/time/tokens_per_s"])) == expected
    assert cost_curves(Tags([memory, *times[1:]])) == []
