"""What a Domain raises when its ranks lose each other, and what is raised without the extension."""

from __future__ import annotations


class IserError(RuntimeError):
    """A Domain has failed; its text says where and what to do.

    Attributes:
      code: number of the kind of failure, as in `Plan.status`.
      rank: the rank that noticed.
      peer: the rank that is missing or differs, -1 if unknown.
      layer: layer of the call.
      stage: name of the stage of the call.
      generation: invocation of the Domain.
    """

    def __init__(self, text, *, code=0, rank=-1, peer=-1, layer=-1, stage="", generation=0):
        super().__init__(text)
        self.code, self.rank, self.peer = code, rank, peer
        self.layer, self.stage, self.generation = layer, stage, generation


class MissingExtensionError(ImportError):
    """The compiled extension could not be loaded, and what was called needs it."""
