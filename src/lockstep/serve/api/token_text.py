"""How single tokens are shown in log-probabilities: their text as it stands in a sentence, and their bytes."""

from __future__ import annotations

import re
from functools import cache

from lockstep.model.tokenizer import Tokenizer


class TokenTexts:
    """Texts and bytes of a tokenizer's tokens, remembered."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}
        # A token alone may lose its leading space; behind another one it shows it.
        self._before = tokenizer.encode("a", add_special=False)[-1:]
        self._skip = len(tokenizer.decode(self._before, skip_special=False))

    def text(self, token: int) -> str:
        """Its text; `bytes:\\xe2\\x80`, as OpenAI writes it, when it is a part of a character."""
        return self._lookup(token)[0]

    def raw(self, token: int) -> list[int]:
        """Its bytes."""
        return list(self._lookup(token)[1])

    def _lookup(self, token: int) -> tuple[str, bytes]:
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def _read(self, token: int) -> tuple[str, bytes]:
        text = self.tokenizer.decode([*self._before, token], skip_special=False)[self._skip :]
        if "\ufffd" not in text:
            return text, text.encode()
        raw = _raw_bytes(self.tokenizer.token(token))
        if raw is None:
            return text, text.encode()
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw


def _raw_bytes(spelling: str) -> bytes | None:
    """The bytes that a vocabulary's spelling stands for: `<0xE2>`, or GPT-2's characters for bytes."""
    if found := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", spelling):
        return bytes([int(found[1], 16)])
    table = _gpt2_bytes()
    return bytes(table[c] for c in spelling) if spelling and all(c in table for c in spelling) else None


@cache
def _gpt2_bytes() -> dict[str, int]:
    """GPT-2's mapping from characters to bytes: printable Latin-1 stands for itself, the rest begins at U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
