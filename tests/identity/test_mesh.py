import pytest

from lens_core.errors import ConfigError
from lens_core.identity import MeshCoordinates


def test_coordinates_are_row_major():
    mesh = MeshCoordinates({"pp": 2, "dp": 3, "tp": 2})
    assert mesh.of(0) == {"pp": 0, "dp": 0, "tp": 0}
    assert mesh.of(7) == {"pp": 1, "dp": 0, "tp": 1}
    assert mesh.of(11) == {"pp": 1, "dp": 2, "tp": 1}
    assert mesh.of(12) == {}


def test_ranks_may_be_in_any_order():
    mesh = MeshCoordinates({"dp": 2, "tp": 2}, ranks=[5, 7, 4, 6])
    assert mesh.of(4) == {"dp": 1, "tp": 0}
    assert mesh.link_attributes(7) == {"lens.peer.dp": 0, "lens.peer.tp": 1}


def test_resource_attributes_have_the_field_s_names():
    attributes = MeshCoordinates({"pp": 2, "cp": 2, "x": 2}).resource_attributes(5)
    assert attributes == {
        "dl.pipeline_parallel.rank": 1,
        "dl.pipeline_parallel.size": 2,
        "dl.context_parallel.rank": 0,
        "dl.context_parallel.size": 2,
        "dl.x.rank": 1,
        "dl.x.size": 2,
    }


@pytest.mark.parametrize("ranks", [[0, 1, 2], [0, 1, 2, 2]])
def test_ranks_must_fill_the_mesh(ranks):
    with pytest.raises(ConfigError):
        MeshCoordinates({"dp": 2, "tp": 2}, ranks=ranks)


@pytest.mark.parametrize(
    "sizes",
    [{"pp": 0}, {"pp": -2, "dp": -1}, {"pp": 2.0}, {"pp": "2"}, {"pp": None}, {1: 2}, [2, 2]],
    ids=repr,
)
def test_sizes_are_integers_from_1_by_name(sizes):
    with pytest.raises(ConfigError, match="by name"):
        MeshCoordinates(sizes)


@pytest.mark.parametrize("ranks", [[0.0, 1.0], ["0", "1"], [-1, 0], 2, [[0, 1]]], ids=repr)
def test_ranks_are_integers_from_0(ranks):
    with pytest.raises(ConfigError, match="ranks"):
        MeshCoordinates({"pp": 2}, ranks)


def test_ranks_and_sizes_of_other_libraries_are_plain_inside():
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    expected = MeshCoordinates({"pp": 2}, [4, 3]).of(3)
    for ranks in (numpy.array([4, 3]), torch.tensor([4, 3]), iter([4, 3]), (numpy.int64(4), 3)):
        coordinates = MeshCoordinates({"pp": numpy.int64(2)}, ranks).of(3)
        assert coordinates == expected == {"pp": 1}
        assert {type(value) for value in coordinates.values()} == {int}
