"""One decoder for every family, its weights in and out, its tokenizer."""

from lockstep.model.decoder import Decoder
from lockstep.model.families import FAMILIES
from lockstep.model.init import random_decoder
from lockstep.model.load import load
from lockstep.model.model import Model
from lockstep.model.tokenizer import Tokenizer, train_bpe

__all__ = ["FAMILIES", "Decoder", "Model", "Tokenizer", "load", "random_decoder", "train_bpe"]
