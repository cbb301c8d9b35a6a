"""Sampling tokens from logits, with bits that do not depend on the batch."""

from bijax.sampling._multinomial import multinomial_with_seed as multinomial_with_seed
from bijax.sampling._sample import Sampled as Sampled
from bijax.sampling._sample import sample as sample
from bijax.sampling._seeds import seed_words as seed_words
