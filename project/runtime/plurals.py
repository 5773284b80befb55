"""Numbers with their nouns, as a person reads them."""


def count(number: int | float, one: str, many: str = "") -> str:
    """`1 image`, `1,438 images`, `2 classes`; `many` where the plural is none of these."""
    return f"{number:,} {one if number == 1 else many or one + ('es' if one.endswith(('s', 'tch')) else 's')}"
