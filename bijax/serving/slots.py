"""Per-sequence data of steps, in arrays: a row for each slot, written once and read many times."""

import numpy as np

from bijax.sampling import seed_words
from bijax.serving.packed import SLOT_COLUMNS
from bijax.serving.sequence import Sequence


class Slots:
    """Rows of the page table and parameters of sampling, by slot.

    Args:
        num_slots: Number of sequences that hold pages at a time.
        table_width: Entries of a page table.
        vocab_size: Of the model.

    Attributes:
        rows: (S, SLOT_COLUMNS + table_width) int32, the words of the seed, the bits of the temperature, the
            number of the slot, the adapter, the pages.
        seeds: (S, 2) uint32, part of the rows.
        temperature: (S,) float32, part of the rows.
        adapters: (S,) int32, part of the rows; 0 for none.
        table: (S, table_width) int32, part of the rows.
        top_k: (S,) int32; 0 keeps all.
        top_p: (S,) float32.
        min_p: (S,) float32.
    """

    def __init__(self, num_slots: int, table_width: int, vocab_size: int) -> None:
        self.rows = np.zeros((num_slots, SLOT_COLUMNS + table_width), np.int32)
        self.seeds = self.rows.view(np.uint32)[:, :2]
        self.temperature = self.rows.view(np.float32)[:, 2]
        self.rows[:, 3] = np.arange(num_slots)
        self.adapters = self.rows[:, 4]
        self.table = self.rows[:, SLOT_COLUMNS:]
        self.top_k = np.zeros(num_slots, np.int32)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self._vocab_size = vocab_size

    def write(self, sequence: Sequence) -> None:
        """Writes the pages that a sequence has got since the last time; all of its row if it is new in its slot."""
        slot, written, pages = sequence.slot, sequence.written, sequence.pages
        if not written:
            params = sequence.request.params
            self.seeds[slot] = seed_words([sequence.seed])[0]
            self.temperature[slot] = params.temperature
            self.adapters[slot] = sequence.request.adapter
            self.top_k[slot] = min(params.top_k or 0, self._vocab_size)
            self.top_p[slot], self.min_p[slot] = params.top_p, params.min_p
        self.table[slot, written : len(pages)] = pages[written:]
        sequence.written = len(pages)
