"""Coordinates of all ranks from a ``DeviceMesh``."""

from __future__ import annotations

from lens_core.errors import ConfigError, MissingExtraError
from lens_core.identity import MeshCoordinates

try:
    from torch.distributed.device_mesh import DeviceMesh
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["mesh_coordinates"]


def mesh_coordinates(mesh: DeviceMesh) -> MeshCoordinates:
    """Coordinates of every rank of the mesh, named as its dimensions are.

    No communication: a mesh knows all its ranks.

    Args:
        mesh: A mesh with named dimensions, such as ``("pp", "dp", "tp")``.

    Raises:
        ConfigError: If its dimensions have no names.
    """
    names = mesh.mesh_dim_names
    if names is None:
        raise ConfigError("mesh_dim_names", None, 'names, such as ("pp", "dp", "tp")')
    sizes = dict(zip(names, mesh.mesh.shape, strict=True))
    return MeshCoordinates(sizes, mesh.mesh.flatten().tolist())
