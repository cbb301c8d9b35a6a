"""The few padded sizes for which programs are compiled. They affect only the speed."""

from dataclasses import dataclass

_SMALLEST_CHUNK = 16


@dataclass(frozen=True)
class Sizes:
    """Rows and tokens of the batches that models are called with.

    Attributes:
        decode: Rows of batches of sequences that get one token, ascending.
        drafted: Tokens of a row where some have drafts; 0 where none has.
        prefill: (rows, tokens) of batches of parts of prompts, ascending by tokens, then rows.

    Example:
        >>> sizes = Sizes.choose(max_running=6, max_prefill_tokens=64, speculative_tokens=0)
        >>> sizes.decode, sizes.prefill
        ((1, 2, 4, 8), ((1, 16), (4, 16), (1, 64)))
        >>> sizes.prefill_for(20, rows=1), sizes.decode_for(3)
        ((1, 64), 4)
    """

    decode: tuple[int, ...]
    drafted: int
    prefill: tuple[tuple[int, int], ...]

    @classmethod
    def choose(cls, *, max_running: int, max_prefill_tokens: int, speculative_tokens: int) -> "Sizes":
        """Returns powers of two for rows, and chunks that grow by four."""
        rows = [1]
        while rows[-1] < max_running:
            rows.append(rows[-1] * 2)
        chunks = [max_prefill_tokens]
        while chunks[-1] > _SMALLEST_CHUNK:
            chunks.append(max(_SMALLEST_CHUNK, chunks[-1] // 4))
        prefill = []
        for chunk in reversed(chunks):
            most = max(r for r in rows if r == 1 or r * chunk <= max_prefill_tokens)
            prefill += [(1, chunk)] + ([(most, chunk)] if most > 1 else [])
        return cls(tuple(rows), speculative_tokens + 1 if speculative_tokens else 0, tuple(prefill))

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """All (rows, tokens)."""
        tokens = (1, self.drafted) if self.drafted else (1,)
        return sorted({*((rows, t) for rows in self.decode for t in tokens), *self.prefill})

    def decode_for(self, rows: int) -> int:
        """Returns the rows of the batch for this many sequences."""
        return next(r for r in self.decode if r >= rows)

    def chunk_for(self, tokens: int) -> int:
        """Returns the tokens of a row for a part of a prompt."""
        return next(t for _, t in self.prefill if t >= tokens)

    def prefill_for(self, tokens: int, *, rows: int) -> tuple[int, int]:
        """Returns the (rows, tokens) for `rows` parts of prompts of at most `tokens` tokens; it may take fewer rows."""
        chunk = self.chunk_for(tokens)
        fitting = [r for r, t in self.prefill if t == chunk]
        return next((r for r in fitting if r >= rows), fitting[-1]), chunk
