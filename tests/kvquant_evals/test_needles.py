"""Retrieval: what is hidden in documents and where, how answers are scored, and that caches are what is read."""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from dataclasses import replace
from functools import partial

import evaluation
import pytest
import torch

from kvquant import QuantCache
from kvquant_evals.error import EvalError
from kvquant_evals.model import Frame, default_text
from kvquant_evals.results import Results
from kvquant_evals.settings import Settings
from kvquant_evals.task import Finding
from kvquant_evals.tasks import _document, _kind, needles
from kvquant_evals.tasks._document import Draft, Question

pytestmark = pytest.mark.broad

TEXT = default_text()
SETTINGS = Settings(needles=2, contexts=(160, 224), documents=2)
SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 8}
# A whole needle or record with a value, between spaces.
SENTENCE = (
    r"(?<!\S)(?:(?:The|One of the) secret codes? of \w+ is VALUE"
    r"|(\w+ in \w+) has room (?:VALUE\. \1 has key \d+|\d+\. \1 has key VALUE))\.(?!\S)"
)
KINDS = [kind.name for kind in _kind.KINDS]


def draft(tiny, kind="multi_key", context=600, index=0, text=TEXT, **settings):
    return Draft(tiny.source, text, replace(SETTINGS, **settings), kind, context, index)


def make(tiny, kind="multi_key", context=600, **options):
    return _kind.find([kind])[0].make(draft(tiny, kind, context, **options))


def tokens(tiny, text):
    return tiny.encode(text).shape[1]


class TestDocument:
    @pytest.mark.parametrize("context", [600, 1500])
    @pytest.mark.parametrize("kind", KINDS)
    def test_has_about_as_many_tokens_as_asked_for(self, tiny, kind, context):
        for index in range(3):
            document = make(tiny, kind, context, index=index, needles=4)
            assert abs(tokens(tiny, document.text) - context) <= needles.SLACK

    @pytest.mark.parametrize("kind", KINDS)
    def test_depends_on_seed_and_index_only(self, tiny, kind):
        document = make(tiny, kind)
        assert make(tiny, kind) == document
        assert make(tiny, kind, seed=1).text != document.text
        assert make(tiny, kind, index=1).text != document.text

    @pytest.mark.parametrize("kind", ["multi_key", "multi_value", "multi_query", "records"])
    def test_needles_lie_between_words_at_their_depths(self, tiny, kind):
        document = make(tiny, kind, needles=5)
        total = tokens(tiny, document.text)
        for question in document.questions:
            assert len(question.depths) == len(question.expected)
            for value, depth in zip(question.expected, question.depths, strict=True):
                (match,) = re.finditer(SENTENCE.replace("VALUE", value), document.text)
                before = tokens(tiny, document.text[: match.start()])
                # Up to a word's and a seam's tokens of 600 before the cut, as few again for the words of its sentence.
                assert before / (total - tokens(tiny, match[0])) == pytest.approx(depth, abs=0.03)

    def test_what_surrounds_needles_is_the_text_and_nothing_is_lost(self, tiny):
        document = make(tiny, "multi_key", needles=5)
        parts = re.split(r"The secret code of \w+ is \d{5}\.", document.text)
        assert len(parts) == 6
        assert "".join("".join(parts).split()) in "".join(TEXT.split())

    def test_single_goes_through_the_depths(self, tiny):
        for index, depth in enumerate([0.0, 0.25, 0.5, 0.75, 1.0, 0.0]):
            document = make(tiny, "single", index=index)
            (question,) = document.questions
            assert question.depth == depth
            (sentence,) = re.findall(r"The secret code of \w+ is \d{5}\.", document.text)
            before = tokens(tiny, document.text.partition(sentence)[0])
            reached = before / (tokens(tiny, document.text) - tokens(tiny, sentence))
            assert reached == pytest.approx(depth, abs=0.03)
        assert make(tiny, "single", index=0).text.startswith("The secret code of")
        assert make(tiny, "single", index=4).text.endswith(".")
        assert make(tiny, "single", depths=1).questions[0].depth == 0.5

    def test_text_without_spaces_is_cut_between_any_two_characters(self):
        assert _document._boundary("one two three", 9) == 7
        assert _document._boundary("one two three", 7) == 7
        assert _document._boundary("one\ntwo three", 6) == 3
        assert _document._boundary("one two three", 2) == 0
        assert _document._boundary("one two three", 13) == 13
        assert _document._boundary("字" * 100, 60) == 60

    def test_text_without_spaces_has_its_needles_where_they_belong(self, tiny):
        document = make(tiny, "single", index=2, text="字句" * 3000)
        before, _, after = document.text.partition("The secret code")
        assert tokens(tiny, before) == pytest.approx(tokens(tiny, after), rel=0.1)
        assert set(before) == {"字", "句", " "}


class TestKinds:
    """What is expected, from the document's text alone."""

    def test_multi_key_asks_for_every_code(self, tiny):
        document = make(tiny, "multi_key", needles=3)
        codes = dict(re.findall(r"The secret code of (\w+) is (\d{5})\.", document.text))
        assert len(set(codes.values())) == 3
        asked = {question.ask: question.expected for question in document.questions}
        assert asked == {f"What is the secret code of {name}?": (code,) for name, code in codes.items()}

    def test_multi_value_asks_for_all_codes_of_one_name(self, tiny):
        document = make(tiny, "multi_value", needles=4)
        found = re.findall(r"One of the secret codes of (\w+) is (\d{5})\.", document.text)
        (question,) = document.questions
        assert {f"What are all the secret codes of {name}?" for name, _ in found} == {question.ask}
        assert question.expected == tuple(code for _, code in found)
        assert len(set(question.expected)) == 4
        assert question.depth is None
        assert list(question.depths) == sorted(question.depths)

    def test_multi_query_asks_for_all_names_at_once(self, tiny):
        document = make(tiny, "multi_query", needles=4)
        codes = dict(re.findall(r"The secret code of (\w+) is (\d{5})\.", document.text))
        (question,) = document.questions
        assert question.ask == f"What are the secret codes of {', '.join(codes)}?"
        assert question.begin == f"{next(iter(codes))}:"
        assert question.expected == tuple(codes.values())

    def test_variable_tracking_asks_for_all_variables_of_a_value(self, tiny):
        document = make(tiny, "variable_tracking", hops=3)
        values = {}
        for name, source in re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)\.", document.text):
            values[name] = values.get(source, source)  # fails to resolve if a variable is used before it is set
        (question,) = document.questions
        asked = re.search(r"\d{5}", question.ask)[0]
        assert Counter(values.values()) == {asked: 4, next(iter(set(values.values()) - {asked})): 4}
        assert question.expected == tuple(name for name, value in values.items() if value == asked)
        assert len(question.depths) == 4

    @pytest.mark.parametrize(("context", "times"), [(600, 1), (2100, 2)])
    def test_common_words_are_the_most_common(self, tiny, context, times):
        document = make(tiny, "common_words", context)
        counts = Counter(re.findall(r"\w+", document.text))
        (question,) = document.questions
        assert {word for word, _ in counts.most_common(5)} == set(question.expected)
        assert sorted(counts.values(), reverse=True)[:6] == [10 * times] * 5 + [times]
        assert question.depth is None

    def test_records_differ_from_others_in_one_part_of_their_key(self, tiny):
        document = make(tiny, "records", 8000, needles=5)
        found = re.findall(r"(\w+) in (\w+) has room (\d+)\. \1 in \2 has key (\d+)\.", document.text)
        fields = {(name, city): {"room": room, "key": key} for name, city, room, key in found}
        assert len(fields) == len(found) == 64
        assert set(Counter(name for name, _ in fields).values()) == {8}
        assert set(Counter(city for _, city in fields).values()) == {8}
        numbers = [number for values in fields.values() for number in values.values()]
        assert len(set(numbers)) == 128
        assert len(document.questions) == 5
        for question in document.questions:
            field, name, city = re.fullmatch(r"Which (\w+) does (\w+) in (\w+) have\?", question.ask).groups()
            assert question.expected == (fields[name, city][field],)

    def test_records_are_as_many_as_fill_half_of_a_short_context(self, tiny):
        document = make(tiny, "records", 600)
        assert 200 <= document.planted <= 300
        assert document.text.count(" has room ") < 64

    def test_are_found_by_name(self):
        assert [kind.name for kind in _kind.find(["records", "single", "records"])] == ["records", "single"]
        assert _kind.find(["all"]) == list(_kind.KINDS)
        with pytest.raises(EvalError, match=r"retrieval 'tea' is unknown; known are single, multi_key, .* and all"):
            _kind.find(["single", "tea"])


class TestQuestion:
    @pytest.mark.parametrize(
        ("answer", "score"),
        [(" 01234.", 1), ("01234", 1), ("\n01234 and", 1), ("1234", 0), ("012345", 0), ("the code 01234", 0), ("", 0)],
    )
    def test_a_single_answer_has_to_come_first(self, answer, score):
        assert Question("", "", ("01234",)).score(answer) == score

    @pytest.mark.parametrize(
        ("answer", "score"),
        [
            ("one, two, three and four", 1),
            ("Four, three; TWO\n1. one", 1),
            ("one, one, one", 0.25),
            ("someone, twofold, three, four5", 0.25),
            ("", 0),
        ],
    )
    def test_of_several_answers_the_share_that_is_found_counts(self, answer, score):
        assert Question("", "", ("one", "two", "three", "four")).score(answer) == score

    def test_the_answer_begins_after_what_the_template_puts_there(self):
        question = Question("Why?", "Because", ("x",))
        assert question.prompt(Frame()) == "\n\nQuestion: Why?\nAnswer: Because"
        assert question.prompt(Frame("<user>", "<end><bot>")) == "\n\nQuestion: Why?<end><bot>Because"


class TestMeasure:
    def test_every_question_is_read_through_its_own_copy_of_the_prefilled_cache(self, tiny, monkeypatch):
        seen = []
        original = needles._reply

        def reply(subject, prompt, cache, most):
            before = cache.get_seq_length()
            found = original(subject, prompt, cache, most)
            seen.append((cache, before, cache.get_seq_length() - before - prompt.shape[1] - len(found.ids)))
            return found

        monkeypatch.setattr(needles, "_reply", reply)
        forward = tiny.model.model.forward
        prefills = []

        def spy(*args, **options):
            prefills.append(options.get("input_ids", *args))
            return forward(*args, **options)

        monkeypatch.setattr(tiny.model.model, "forward", spy)
        found = evaluation.scores(tiny, needles.TASK, SETTINGS, {"4": partial(QuantCache, bits=4, **SMALL_PAGES)})
        assert [scores["questions"] for scores in found.values()] == [8, 8]  # 2 contexts, 2 documents, 2 needles
        assert len({id(cache) for cache, _, _ in seen}) == len(seen) == 16
        assert {added for _, _, added in seen} == {-1}  # the last token of an answer is not read
        lengths = [ids.shape[1] for ids in prefills if ids.shape[1] > 100]
        assert len(lengths) == 2 * 2 * 2  # caches, contexts, documents
        assert [before for _, before, _ in seen] == [length for length in lengths for _ in range(2)]

    def test_answers_are_those_of_greedy_decoding_without_a_cache(self, tiny):
        settings = replace(SETTINGS, contexts=(160,), documents=1, retrieval=("multi_value",))
        row = evaluation.rows(tiny, [needles.TASK], settings)[evaluation.FULL_PRECISION]
        ((answer,),) = (item["answers"] for item in row.items["needles"])
        document = make(tiny, "multi_value", 160)
        ids = torch.cat([tiny.encode(document.text), tiny.encode(document.questions[0].prompt(Frame()))], dim=1)
        first = ids.shape[1]
        with torch.no_grad():
            for _ in range(2 * 10):
                ids = torch.cat([ids, tiny.model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        end = ids[0, first:].tolist()
        end = end[: end.index(0)] if 0 in end else end
        assert answer["answer"] == tiny.decode(end).strip()

    def test_an_answer_ends_with_the_text(self, tiny, monkeypatch):
        prompt = tiny.encode("What comes next?")
        reply = partial(needles._reply, tiny, prompt, most=6)
        (first, *rest) = reply(cache=QuantCache(bits=16)).ids
        assert len(rest) == 5
        for end in (first, [first, 5]):
            monkeypatch.setattr(tiny.model.generation_config, "eos_token_id", end)
            assert reply(cache=QuantCache(bits=16)).ids == [first]

    def test_divergence_against_direct_computation(self):
        full, logits = torch.randn(5, 7), torch.randn(5, 7)
        p, q = full.double().softmax(-1), logits.double().softmax(-1)
        assert needles._divergence(full, logits) == pytest.approx((p * (p / q).log()).sum(-1).mean().item(), rel=1e-5)

    def test_identity_gives_the_answers_of_full_precision(self, tiny):
        kinds = tuple(kind for kind in KINDS if kind != "common_words")  # which needs longer documents
        settings = replace(SETTINGS, contexts=(300,), documents=1, depths=2, retrieval=kinds, hops=1)
        full, identity = evaluation.rows(
            tiny, [needles.TASK], settings, {"16": partial(QuantCache, bits=16, **SMALL_PAGES)}
        ).values()
        assert identity.scores == full.scores
        assert identity.items == full.items
        assert full.scores["retrieval_agreement"] == 1.0
        assert full.scores["retrieval_kl"] == full.scores["retrieval_kl_median"] == 0.0
        assert {f"retrieval_{kind}_300" for kind in kinds} < full.scores.keys()

    def test_a_broken_cache_is_far_from_full_precision(self, tiny):
        settings = replace(SETTINGS, contexts=(160,), documents=1)
        caches = {"8": partial(QuantCache, bits=8, **SMALL_PAGES)} | evaluation.broken_caches(**SMALL_PAGES)
        caches.pop("lost sinks")  # of which a random model makes no use
        found = evaluation.rows(tiny, [needles.TASK], settings, caches)
        assert [label for label, row in found.items() if row.faults] == ["one bit", "swapped pages"]
        assert found["8"].scores["retrieval_agreement"] == 1.0
        assert found["one bit"].scores["retrieval_agreement"] == 0.0

    def test_values_tell_what_was_asked_and_given(self, tiny):
        settings = replace(SETTINGS, retrieval=("single", "multi_query"), contexts=(160,), documents=1, depths=2)
        results = Results()
        report = evaluation.evaluate(tiny, [needles.TASK], settings, results=results)
        items = report.rows[0].items["needles"]
        assert [(item["kind"], item["context"], item["index"], len(item["answers"])) for item in items] == [
            ("single", 160, 0, 1),
            ("single", 160, 1, 1),
            ("multi_query", 160, 0, 1),
        ]
        names = {"kind", "context", "depth", "depths", "expected", "answer", "score", "correct"}
        assert all(answer.keys() == names for item in items for answer in item["answers"])
        assert [item["answers"][0]["depth"] for item in items] == [0.0, 1.0, None]
        assert [len(item["answers"][0]["expected"]) for item in items] == [1, 1, 2]

    def test_a_chat_template_surrounds_document_and_question(self, tiny, monkeypatch):
        tokenizer = copy.deepcopy(tiny.source.tokenizer)
        tokenizer.chat_template = "{% for m in messages %}User: {{ m.content }}{% endfor %}{{ '\\nModel: ' }}"
        chatting = replace(tiny, source=replace(tiny.source, tokenizer=tokenizer))
        seen = []
        original = needles._reply

        def reply(subject, prompt, cache, most):
            seen.append((subject.decode(prompt[0]), cache.get_seq_length()))
            return original(subject, prompt, cache, most)

        monkeypatch.setattr(needles, "_reply", reply)
        settings = replace(SETTINGS, chat=True, contexts=(160,), documents=1)
        evaluation.evaluate(chatting, [needles.TASK], settings)
        document = make(tiny, "multi_key", 160)
        assert [length for _, length in seen] == [tokens(tiny, "User: " + document.text)] * 2
        name = document.questions[0].begin.split()[-2]
        asked = f"What is the secret code of {name}?"
        assert seen[0][0] == f"\n\nQuestion: {asked}\nModel: The secret code of {name} is"

    def test_progress_adds_up_to_what_was_foretold(self, tiny):
        settings = replace(SETTINGS, retrieval=("single", "multi_key", "multi_value"), contexts=(160,), depths=2)
        for item in needles.TASK.items(tiny.source, TEXT, settings):
            kind = _kind.find([item.about["kind"]])[0]
            questions = len(make(tiny, kind.name, 160).questions)
            assert item.tokens == 160 + questions * (needles.QUESTION_TOKENS + kind.new_tokens)


class TestScores:
    def test_kinds_and_contexts_have_the_same_weight(self):
        answers = [
            {"kind": "single", "context": 160, "score": 1.0},
            {"kind": "single", "context": 160, "score": 0.0},
            {"kind": "single", "context": 224, "score": 1.0},
            {"kind": "multi_value", "context": 160, "score": 0.25},
            {"kind": "multi_value", "context": 224, "score": 0.0},
        ]
        assert needles._means(answers) == {
            "retrieval": (0.5 + 1 + 0.25 + 0) / 4,
            "retrieval_160": (0.5 + 0.25) / 2,
            "retrieval_224": 0.5,
            "retrieval_single": 0.75,
            "retrieval_multi_value": 0.125,
            "retrieval_single_160": 0.5,
            "retrieval_single_224": 1.0,
            "retrieval_multi_value_160": 0.25,
            "retrieval_multi_value_224": 0.0,
        }

    def test_columns_are_contexts_and_with_several_kinds_also_these(self):
        titles = [column.title for column in needles.TASK.columns(SETTINGS)]
        assert titles == ["needles @160", "needles @224"]
        columns = needles.TASK.columns(replace(SETTINGS, retrieval=("single", "records")))
        assert [column.title for column in columns] == [*titles, "single", "records"]
        assert [column.score for column in columns][1:] == ["retrieval_224", "retrieval_single", "retrieval_records"]

    def test_agreement_and_divergence_are_those_over_all_questions(self):
        answer = {"kind": "single", "context": 160, "score": 1.0}
        found = [
            Finding({"answers": [answer] * 3}, {"agreement": [1.0, 0.0, 1.0], "kl": [0.1, 0.2, 0.3]}),
            Finding({"answers": [answer]}, {"agreement": [0.0], "kl": [0.6]}),
        ]
        scores = needles.TASK.scores(found, SETTINGS)
        assert scores["retrieval_agreement"] == 0.5
        assert scores["retrieval_kl"] == pytest.approx(0.3)
        assert scores["retrieval_kl_median"] == pytest.approx(0.25)
        assert scores["questions"] == 4

    def test_a_cache_is_broken_if_questions_are_read_differently(self):
        assert needles.TASK.fault({"retrieval_kl_median": 0.2}) is None
        assert needles.TASK.fault({"retrieval_kl_median": 0.4}) == "median KL 0.40 nats while questions are read"


class TestCheck:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"needles": 27}, "needles=27 must be 1 to 26"),
            ({"needles": 0}, "needles=0 must be 1 to 26"),
            ({"records": 451}, "records=451 must be 1 to 450"),
            ({"documents": 0}, "documents=0 must be at least 1"),
            ({"depths": 0}, "depths=0 must be at least 1"),
            ({"hops": 0}, "hops=0 must be at least 1"),
            ({"retrieval": ("tea",)}, "retrieval 'tea' is unknown; known are single, "),
            ({"contexts": (20,)}, r"context=20 is too short for the \d+ tokens that multi_key hides"),
            ({"contexts": (1000,)}, "context=1000 and its question exceed the model's context of 1024"),
            ({"contexts": (900,), "retrieval": ("multi_value",), "needles": 10}, "exceed the model's context of 1024"),
            ({"contexts": (10**6,)}, r"the text has \d+ tokens, fewer than context=1000000; use a longer text"),
            ({"chat": True}, "has no chat template"),
        ],
    )
    def test_what_cannot_be_done_is_refused(self, tiny, change, message):
        with pytest.raises(EvalError, match=message):
            needles.TASK.check(tiny.source, TEXT, replace(SETTINGS, **change))

    def test_what_can_be_done_is_not(self, tiny):
        needles.TASK.check(tiny.source, TEXT, replace(SETTINGS, retrieval=("all",), contexts=(800,)))

    def test_text_with_few_words_has_none_that_are_common(self, tiny):
        settings = replace(SETTINGS, retrieval=("common_words",), contexts=(512,))
        with pytest.raises(EvalError, match="the text has only 3 words of 4 to 8 letters, too few for common_words"):
            needles.TASK.check(tiny.source, "some more words " * 1000, settings)


def test_a_question_without_a_number_is_not_lost_among_others():
    answer = {"kind": "single", "context": 64, "score": 1.0}
    kl = [math.nan, math.nan, 0.01, 0.02, 0.03]
    found = Finding({"answers": [answer] * 5}, {"agreement": [1.0] * 5, "kl": kl})
    assert needles.TASK.fault(needles.TASK.scores([found], Settings())) is not None
