"""The journal: every measured block, one per line, so that a run that is killed loses none of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from records.blocks import Block
from records.labels import DATASET_VERSION
from utils import files
from utils.errors import UserError


class Journal:
    """Blocks in the order measured; this one keeps them in memory alone."""

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self.blocks = list(blocks)

    def append(self, block: Block) -> None:
        """Adds a block."""
        self.blocks.append(block)


class JournalFile(Journal):
    """A journal in a file. It begins with the blocks that are there; a block is added to the file at once.

    Raises:
        UserError: see `read_blocks`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(read_blocks(path))
        self.path = path

    def append(self, block: Block) -> None:
        append_block(self.path, block)
        super().append(block)


def append_block(path: Path, block: Block) -> None:
    """Adds a block to a journal's file and forces it to disk."""
    files.append_line(path, block.model_dump_json())


def read_blocks(path: Path) -> list[Block]:
    """The blocks of a journal's file, in the order measured; none where there is no file. A torn last line is left out.

    Raises:
        UserError: a line that is no block of this version.
    """
    blocks = []
    for number, line in enumerate(files.read_lines(path), 1):
        try:
            blocks.append(Block.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(f"{path}, line {number}: not a block of version {DATASET_VERSION} "
                            f"({first['loc']}: {first['msg']}); remove the line or start a new dataset") from None
    return blocks
