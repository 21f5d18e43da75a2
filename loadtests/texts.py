"""Text of a given length that is the same for the same key; pure."""

from __future__ import annotations

import random

# Short and common, so that most tokenizers make one token of each, with the space before it.
_COMMON = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head house
service friend father power hour game line end member law car city community name president team minute idea
body information back parent face others level office door health person art war history party result change
morning reason research girl guy moment air teacher force education foot boy age policy process music market
sense nation plan college interest death experience effect use class control care field development role
effort rate heart drug show leader light voice wife police mind price report decision son view relationship
town road arm difference value building action season society tax director position player record paper space
ground form event matter center couple site project activity star table need court oil situation cost industry
figure street image phone data picture practice piece land product doctor wall patient worker news test movie
north love step note garden river island
"""
WORDS = tuple(_COMMON.split())
_SENTENCE = 12


def random_for(*key: object) -> random.Random:
    """A generator of random numbers that depends on the key alone, in every process."""
    return random.Random("/".join(str(part) for part in key))


def text(words: int, *key: object) -> str:
    """Text of ``words`` words for a key. A word is about one token."""
    chosen = random_for("text", *key).choices(WORDS, k=words)
    for index in range(_SENTENCE - 1, words, _SENTENCE):
        chosen[index] += "."
    return " ".join(chosen)
