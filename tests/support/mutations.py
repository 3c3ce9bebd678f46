"""Files that nobody meant to write: random changes to a JSON file, in its bytes and in its data.

Every case is a pure function of its seed, so a failure is repeated by its number.
"""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

NUMBERS = (
    *(0, 1, -1, 2, 255, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1),
    *(2**61, 2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**40, 10**4000),
)
OTHERS = (
    *(0.0, -0.0, 1.5, 1e308, float("nan"), float("inf"), float("-inf")),
    *(True, False, None, "", "0", "\x00", "🔥" * 300, "__import__('os')._exit(77)"),
    *([], [[]], {}, {"": None}, [0, 0], ["a"], {"__reduce__": "os.system"}),
)
PIECES = (
    *(b"NaN", b"-Infinity", b"1e999", b"-0", b"1E-5000", b"9" * 5000, b"0x10", b"01", b"+1"),
    *(b"null", b"true", b'"', b"\\", b'"\\ud800"', b'"\\u0000"', b"\x00", b"\xef\xbb\xbf"),
    *(b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"{", b"}", b"[", b"]"),
    *(b",", b":", b"//", b"/*", b"\r\n", b"[" * 3000, b'{"a":' * 3000, b"\xe2\x80\xa8"),
    *(b"!!python/object:os.system", b"\x80\x04\x95"),
)


def mutated_bytes(text: bytes, chance: random.Random) -> bytes:
    """One to four changes to the bytes: flips, cuts, repeats, pieces of other languages."""
    data = bytearray(text)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        end = min(len(data), at + chance.choice((1, 1, 2, 8, 60, 1000)))
        match chance.randrange(7):
            case 0 if at < len(data):
                data[at] ^= 1 << chance.randrange(8)
            case 1 if at < len(data):
                data[at] = chance.randrange(256)
            case 2:
                del data[at:end]
            case 3:
                data[at:at] = data[at:end]
            case 4:
                data[at:end] = chance.choice(PIECES)
            case 5:
                data[at:at] = chance.choice(PIECES)
            case _:
                if chance.random() < 0.1:
                    del data[at:]
    return bytes(data)


def mutated_record(record: Any, chance: random.Random) -> Any:
    """One to three changes to the data: other values, missing, doubled, moved and swapped ones."""
    record = copy.deepcopy(record)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        places = _places(record)
        if not places:
            return record
        holder, key = chance.choice(places)
        CHANGES[chance.randrange(len(CHANGES))](holder, key, chance, places)
    return record


def mutated_text(record: Any, chance: random.Random) -> bytes:
    """Changed data as the bytes of a file; now and then with a key that stands twice, deep nesting
    in place of a value, or broken bytes on top."""
    text = json.dumps(mutated_record(record, chance), indent=chance.choice((None, None, 1)))
    match chance.randrange(12):
        case 0:
            text = _key_twice(text, chance)
        case 1:
            text = _deep(text, chance)
        case 2:
            return mutated_bytes(text.encode(), chance)
    return text.encode()


def _places(record: Any) -> list[tuple[Any, Any]]:
    """Every (holder, key or index) of the data. Long lists give a few of their entries, so that
    the parts of a file are chosen about evenly."""
    places: list[tuple[Any, Any]] = []
    todo = [record]
    while todo:
        holder = todo.pop()
        if isinstance(holder, dict):
            keys = list(holder)
        elif isinstance(holder, list):
            keys = list(range(len(holder)))
        else:
            continue
        places.extend((holder, key) for key in keys)
        todo.extend(holder[key] for key in keys)
    return places


def _other_value(holder: Any, key: Any, chance: random.Random, places: list[Any]) -> None:
    holder[key] = copy.deepcopy(chance.choice(OTHERS))


def _other_number(holder: Any, key: Any, chance: random.Random, places: list[Any]) -> None:
    """A number in place of a number: the change that is most often still a valid file."""
    numbers = [place for place in places if type(place[0][place[1]]) is int]
    if numbers:
        holder, key = chance.choice(numbers)
        near = holder[key] + chance.choice((-1, 1, 2, 100))
        holder[key] = chance.choice((*NUMBERS, near, near, chance.randrange(64)))


def _missing(holder: Any, key: Any, chance: random.Random, places: list[Any]) -> None:
    del holder[key]


def _doubled(holder: Any, key: Any, chance: random.Random, places: list[Any]) -> None:
    if isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[chance.choice(("extra", "", key + "s", key.upper(), "\x00"))] = holder[key]


def _swapped(holder: Any, key: Any, chance: random.Random, places: list[Any]) -> None:
    other = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    holder[key], holder[other] = holder[other], holder[key]


def _moved(holder: Any, key: Any, chance: random.Random, places: list[Any]) -> None:
    source, name = chance.choice(places)
    holder[key] = copy.deepcopy(source[name])


def _shuffled(holder: Any, key: Any, chance: random.Random, places: list[Any]) -> None:
    if isinstance(holder[key], list):
        chance.shuffle(holder[key])


def _repeated(holder: Any, key: Any, chance: random.Random, places: list[Any]) -> None:
    if isinstance(holder[key], list):
        holder[key] = (holder[key] * chance.choice((2, 50)))[:20_000]


CHANGES: tuple[Callable[[Any, Any, random.Random, list[Any]], None], ...] = (
    *(_other_value, _other_value, _other_number, _other_number, _other_number),
    *(_missing, _doubled, _swapped, _moved, _shuffled, _repeated),
)


def _key_twice(text: str, chance: random.Random) -> str:
    opens = [at for at, character in enumerate(text) if character == "{"]
    if not opens:
        return text
    at = chance.choice(opens) + 1
    return text[:at] + '"name": 1, "size": 2, "name": "x", ' + text[at:]


def _deep(text: str, chance: random.Random) -> str:
    depth = chance.choice((50, 900, 1100, 20_000, 200_000))
    at = text.find(":", chance.randrange(len(text))) + 1
    if chance.random() < 0.5:
        return text[:at] + "[" * depth + "]" * depth + "," + text[at:]
    return text[:at] + '{"a":' * depth + "1" + "}" * depth + "," + text[at:]
