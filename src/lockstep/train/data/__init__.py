"""Data: sources -> documents -> token file -> packed sequences -> global batches, each a pure function of the last."""

from lockstep.train.data.corpus import Corpus, Report, scan, tokenised, tokenizer_key, trained_tokenizer
from lockstep.train.data.dataset import Dataset, dataset
from lockstep.train.data.order import batch_at, sequence_at
from lockstep.train.data.packing import Batch, Sequences, batch_of, pack
from lockstep.train.data.sources import Document, documents
from lockstep.train.data.tokens import Tokens, open_tokens, remove_unfinished_data

__all__ = [
    "Batch",
    "Corpus",
    "Dataset",
    "Document",
    "Report",
    "Sequences",
    "Tokens",
    "batch_at",
    "batch_of",
    "dataset",
    "documents",
    "open_tokens",
    "pack",
    "remove_unfinished_data",
    "scan",
    "sequence_at",
    "tokenised",
    "tokenizer_key",
    "trained_tokenizer",
]
