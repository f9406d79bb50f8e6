"""Prompt clean-up, token ids, the limit of 512, and tokenizer files that are not usable."""

import io
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from svgen import tokenizer as tokenizer_file
from svgen.config import TEXT_TOKENS
from svgen.errors import DownloadError, FileError, UsageError
from svgen.tokenizer import TokenIds, Tokenizer, bucket_length, clean_prompt, pad_ids

PAD, EOS, UNKNOWN = 0, 1, 2
PIECES = ["▁", "▁a", "▁cat", "▁dog", *"abcdefghijklmnopqrstuvwxyz<>/0123456789.,!é猫"]
VOCABULARY = 3 + len(PIECES)

PROMPTS = [
    "a cat",
    "",
    "   ",
    "  a \t cat\n\n dog\u3000a\u00a0cat ",
    "a cat &amp;amp; a dog &lt;b&gt;",
    "cafÃ© â€™ schÃ¶n",
    "“curly” ‘quotes’ … ﬁne",
    "🐉 dragon 👩‍👩‍👧 flag 🇩🇪",
    "قطة تمشي على الثلج",
    "猫在雪地里奔跑，慢动作。",
    "a </s> cat <pad> dog <unk>",
    "<extra_id_0> a <extra_id_7>cat",
    "a\x00cat\x1b[31m dog\x07",
    "a\u200bcat\ufeff \u202edog",
    "e\u0301 é ① ２ ㎏ ¨",
    "\ud83d\ude00 pair",
    "a" * 700,
    "a cat dog " * 300,
]


def build(folder: Path, *, eos: bool = True, config: object = True) -> Path:
    """Write a small tokenizer of T5's make into the `tokenizer` folder of a checkpoint."""
    folder = folder / "tokenizer"
    folder.mkdir(parents=True)
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocabulary += [(piece, -1.0 - 0.01 * rank) for rank, piece in enumerate(PIECES)]
    made = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=UNKNOWN, byte_fallback=False))
    metaspace = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
    made.add_special_tokens(["<pad>", "</s>", "<unk>"])
    made.add_special_tokens([f"<extra_id_{i}>" for i in range(100)])
    if eos:
        made.post_processor = processors.TemplateProcessing(
            single=["$A", "</s>"], pair=["$A", "</s>", "$B", "</s>"], special_tokens=[("</s>", EOS)]
        )
    made.enable_truncation(7)
    made.enable_padding(length=9, pad_id=5, pad_token="▁cat")
    made.save(str(folder / "tokenizer.json"))
    if config is True:
        config = {"tokenizer_class": "T5TokenizerFast", "eos_token": "</s>", "pad_token": "<pad>"}
        config |= {"unk_token": "<unk>", "extra_ids": 100}
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder.parent


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.load(build(tmp_path_factory.mktemp("model")), vocabulary=256384)


def ids_of(*pieces: str) -> list[int]:
    return [3 + PIECES.index(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("  a \t cat\n\nruns  ", "a cat runs"),
        ("a\u3000cat\u00a0runs\u2028fast", "a cat runs fast"),
        ("&lt;cat&gt; &amp;amp; dog", "<cat> & dog"),
        ("&amp;lt;b&amp;gt;", "<b>"),
        ("schÃ¶n cafÃ©", "schön café"),
        ("itâ€™s", "it's"),
        ("“curly” ﬁne", '"curly" fine'),
        ("🐉 👩‍👩‍👧", "🐉 👩‍👩‍👧"),
        ("قطة تمشي", "قطة تمشي"),
        ("\u202eabc", "\u202eabc"),
        ("猫，在", "猫,在"),
        ("a\x00b\x1b[31mc\x07", "abc"),
        ("\ud83d\ude00", "😀"),
        ("a\udc80b", "a\ufffdb"),
        ("&#0; &#xD800;", "\ufffd \ufffd"),
        ("&nbsp;", ""),
        ("\x00\x01", ""),
        ("", ""),
    ],
)
def test_clean_prompt_when_awkward(given, expected):
    assert clean_prompt(given) == expected


def test_clean_prompt_of_any_character_can_be_encoded():
    for code in [*range(0x3000), *range(0xD700, 0xE100), *range(0xFE00, 0x10000), 0x10FFFF]:
        clean_prompt(f"a {chr(code)} b").encode()


def test_encode_gives_ids_and_the_end_token(tokenizer):
    tokens = tokenizer.encode("a  cat &amp; dog", truncate=False)
    assert tokens.text == "a cat & dog"
    assert tokens.ids.tolist() == [*ids_of("▁a", "▁cat", "▁"), UNKNOWN, *ids_of("▁dog"), EOS]
    assert (tokens.ids.dtype, tokens.length, tokens.cut) == (np.int32, 6, "")


def test_padding_and_truncation_of_the_file_are_not_used(tokenizer):
    assert tokenizer.encode("a cat", truncate=False).ids.tolist() == [*ids_of("▁a", "▁cat"), EOS]
    assert tokenizer.encode("a cat " * 10, truncate=False).length == 21


def test_end_token_when_the_file_does_not_add_it_is_added(tmp_path):
    tokenizer = Tokenizer.load(build(tmp_path, eos=False))
    assert tokenizer.encode("a cat", truncate=False).ids.tolist() == [*ids_of("▁a", "▁cat"), EOS]
    assert tokenizer.encode("", truncate=False, allow_empty=True).ids.tolist() == [EOS]


@pytest.mark.parametrize("eos", [True, False])
def test_end_token_written_in_the_prompt_stays(tmp_path, eos):
    tokenizer = Tokenizer.load(build(tmp_path, eos=eos))
    tokens = tokenizer.encode("a</s> &lt;/s&gt;", truncate=False)
    assert tokens.ids.tolist() == [*ids_of("▁a"), EOS, EOS, EOS]


@pytest.mark.parametrize("prompt", ["", "  \n", "\x00\x07", "&nbsp;"])
def test_empty_prompt_is_an_error_unless_allowed(tokenizer, prompt):
    with pytest.raises(UsageError) as caught:
        tokenizer.encode(prompt, truncate=True)
    assert caught.value.code == "E_PROMPT_EMPTY"
    assert caught.value.message.isprintable()
    tokens = tokenizer.encode(prompt, truncate=True, allow_empty=True)
    assert tokens.ids.tolist() == [EOS]


def test_prompt_of_512_tokens_is_the_longest(tokenizer):
    assert tokenizer.encode("a " * 511, truncate=False).length == TEXT_TOKENS
    with pytest.raises(UsageError):
        tokenizer.encode("a " * 512, truncate=False)


def test_long_prompt_names_the_words_cut_and_the_flag(tokenizer):
    prompt = "a " * 509 + "cat dog " + "bead " + "fin " + "a dog " * 20
    with pytest.raises(UsageError) as caught:
        tokenizer.encode(prompt, truncate=False, name="negative prompt")
    error = caught.value
    # 509 + 2 words of one token, then b-e-a-d and f-i-n with a leading space each, then 40.
    assert error.code == "E_PROMPT_LONG"
    assert error.message == (
        f"the negative prompt has {511 + 5 + 4 + 40 + 1} tokens; these words would be cut: "
        "bead fin a dog a dog a dog a dog a dog …"
    )
    assert "--truncate" in error.hint
    assert error.details["tokens"] == 561


def test_long_prompt_names_a_word_that_is_cut_in_its_middle_whole(tokenizer):
    tokens = tokenizer.encode("a " * 509 + "bead fin", truncate=True)
    assert tokens.cut == "bead fin"
    assert tokens.ids[-3:].tolist() == [*ids_of("▁", "b"), EOS]


def test_long_prompt_without_spaces_names_only_what_is_cut(tokenizer):
    tokens = tokenizer.encode("猫" * 700, truncate=True)
    assert tokens.length == TEXT_TOKENS
    assert tokens.cut == "猫" * (1 + 700 - 511)
    with pytest.raises(UsageError) as caught:
        tokenizer.encode("猫" * 700, truncate=False)
    assert len(caught.value.message) < 240


def test_truncate_keeps_511_ids_and_the_end_token(tokenizer):
    tokens = tokenizer.encode("a cat dog " * 300, truncate=True)
    assert tokens.length == TEXT_TOKENS
    assert tokens.ids.tolist() == [*(ids_of("▁a", "▁cat", "▁dog") * 171)[:511], EOS]
    assert len(tokens.cut.split()) == 900 - 511


def test_truncate_when_short_changes_nothing(tokenizer):
    short = tokenizer.encode("a cat", truncate=True)
    assert short.ids.tolist() == tokenizer.encode("a cat", truncate=False).ids.tolist()
    assert short.cut == ""


@pytest.mark.parametrize("prompt", PROMPTS)
def test_awkward_prompts_encode_to_known_ids(tokenizer, prompt):
    ids = tokenizer.encode(prompt, truncate=True, allow_empty=True).ids
    assert 1 <= len(ids) <= TEXT_TOKENS
    assert ids[-1] == EOS
    assert ids.min() >= 0
    assert ids.max() < VOCABULARY + 100


@pytest.mark.parametrize("unit", ["a cat dog ", "a", "猫，", "Ã©", "&amp;", "\udc80", "\x1b[31m"])
def test_prompt_of_100_kb_takes_under_a_second(tokenizer, unit):
    prompt = unit * (100_000 // len(unit.encode(errors="surrogatepass")))
    start = time.perf_counter()
    tokenizer.encode(prompt, truncate=True, allow_empty=True)
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize(
    ("tokens", "length"),
    [(0, 64), (1, 64), (63, 64), (64, 128), (448, 512), (511, 512), (512, 512)],
)
def test_bucket_length_leaves_a_row_of_padding(tokens, length):
    assert bucket_length(tokens) == length


@pytest.mark.parametrize("tokens", [-1, 513])
def test_bucket_length_out_of_range_is_refused(tokens):
    with pytest.raises(ValueError, match="tokens"):
        bucket_length(tokens)


def test_pad_ids_fills_rows_with_zero():
    prompts = [TokenIds(ids=np.array(ids, np.int32), text="") for ids in ([5, 6, 1], [1])]
    ids, lengths = pad_ids(prompts, 4)
    assert ids.tolist() == [[5, 6, 1, PAD], [1, PAD, PAD, PAD]]
    assert lengths.tolist() == [3, 1]
    assert (ids.dtype, lengths.dtype) == (np.int32, np.int32)
    with pytest.raises(ValueError, match="do not fit"):
        pad_ids(prompts, 2)


def corrupt_files() -> dict[str, bytes]:
    return {
        "empty": b"",
        "binary": b"\xff\xfe\x00\x01" * 50,
        "other json": b'{"a": 1}',
        "nested": b"[" * 200_000,
        "lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 16\n",
    }


@pytest.mark.parametrize("content", corrupt_files().values(), ids=corrupt_files())
def test_tokenizer_file_when_corrupt_is_named(tmp_path, content):
    path = build(tmp_path) / "tokenizer" / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DownloadError, match=r"tokenizer\.json is not a usable") as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.code == "E_CHECKPOINT"


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
def test_tokenizer_file_when_truncated_is_named(tmp_path, keep):
    path = build(tmp_path) / "tokenizer" / "tokenizer.json"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    with pytest.raises(DownloadError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_tokenizer_file_when_the_library_panics_is_named(tmp_path, capfd):
    path = build(tmp_path) / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    del content["post_processor"]["special_tokens"]["</s>"]
    path.write_text(json.dumps(content))
    with pytest.raises(DownloadError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_tokenizer_file_when_it_cannot_spell_a_letter_is_named(tmp_path):
    path = build(tmp_path) / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["unk_id"] = None
    path.write_text(json.dumps(content))
    with pytest.raises(DownloadError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_tokenizer_file_when_missing_is_named(tmp_path):
    with pytest.raises(DownloadError, match=r"tokenizer\.json") as caught:
        Tokenizer.load(tmp_path)
    assert "missing" in caught.value.why


def test_tokenizer_file_when_a_folder_is_named(tmp_path):
    (tmp_path / "tokenizer" / "tokenizer.json").mkdir(parents=True)
    with pytest.raises(FileError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_tokenizer_file_when_huge_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_file, "MAX_FILE_BYTES", 1 << 10)
    with pytest.raises(DownloadError, match=r"tokenizer\.json") as caught:
        Tokenizer.load(build(tmp_path))
    assert "larger than" in caught.value.why


def test_tokenizer_with_more_ids_than_the_encoder_is_refused(tmp_path):
    folder = build(tmp_path)
    Tokenizer.load(folder, vocabulary=VOCABULARY + 100)
    with pytest.raises(DownloadError) as caught:
        Tokenizer.load(folder, vocabulary=VOCABULARY + 99)
    assert str(VOCABULARY + 99) in caught.value.why


@pytest.mark.parametrize(
    "config",
    [None, {}, {"eos_token": None}, {"eos_token": {"content": "</s>", "special": True}}],
    ids=["absent", "empty", "null", "object"],
)
def test_end_token_of_tokenizer_config_may_be_written_in_several_ways(tmp_path, config):
    tokenizer = Tokenizer.load(build(tmp_path, eos=False, config=config))
    assert tokenizer.encode("a", truncate=False).ids[-1] == EOS


def test_end_token_when_another_is_named_is_used(tmp_path):
    tokenizer = Tokenizer.load(build(tmp_path, eos=False, config={"eos_token": "▁dog"}))
    assert tokenizer.encode("a", truncate=False).ids[-1:].tolist() == ids_of("▁dog")


@pytest.mark.parametrize(
    "config",
    [[], {"eos_token": {}}, {"eos_token": 5}, {"eos_token": "none"}, {"eos_token": "\ud800"}],
)
def test_end_token_when_unusable_is_an_error(tmp_path, config):
    with pytest.raises(DownloadError, match="not a usable tokenizer"):
        Tokenizer.load(build(tmp_path, config=config))


def test_module_loads_no_jax():
    program = "import sys, svgen.tokenizer; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def assert_same_ids(checkpoint: Path) -> None:
    """Compare every awkward prompt with what WanPipeline asks of transformers' tokenizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        theirs = transformers.AutoTokenizer.from_pretrained(checkpoint / "tokenizer")
    assert type(theirs).__name__.startswith("T5")
    ours = Tokenizer.load(checkpoint)
    for prompt in PROMPTS:
        tokens = ours.encode(prompt, truncate=True, allow_empty=True)
        expected = theirs(
            [tokens.text],
            padding="max_length",
            max_length=TEXT_TOKENS,
            truncation=True,
            add_special_tokens=True,
            return_attention_mask=True,
        )
        ids, lengths = pad_ids([tokens], TEXT_TOKENS)
        assert ids[0].tolist() == expected["input_ids"][0], prompt
        assert lengths[0] == sum(expected["attention_mask"][0]), prompt


@pytest.mark.parity
@pytest.mark.parametrize("eos", [True, False])
def test_ids_equal_transformers(tmp_path, eos):
    assert_same_ids(build(tmp_path, eos=eos))


@pytest.mark.parity
def test_ids_equal_transformers_when_sentencepiece_made_the_vocabulary(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sentencepiece = pytest.importorskip("sentencepiece")
        transformers = pytest.importorskip("transformers")
        folder = tmp_path / "tokenizer"
        folder.mkdir()
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([clean_prompt(prompt) for prompt in PROMPTS if prompt.strip()]),
            model_writer=model,
            vocab_size=200,
            hard_vocab_limit=False,
            character_coverage=0.98,
            minloglevel=2,
            **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
        )
        (folder / "spiece.model").write_bytes(model.getvalue())
        transformers.T5Tokenizer.from_pretrained(folder).save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    assert content["normalizer"]["type"] == "Precompiled"  # sentencepiece's NFKC, as Wan's file has
    assert_same_ids(tmp_path)


@pytest.mark.parity
def test_clean_prompt_equals_diffusers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline_wan = pytest.importorskip("diffusers.pipelines.wan.pipeline_wan")
    for prompt in [
        *PROMPTS,
        "&amp;lt; \x85 &copy &#x80;",
        "ＦＵＬＬ",
        "a\r\nb",
        "\ud83d\udc80\udc80",
    ]:
        assert clean_prompt(prompt) == pipeline_wan.prompt_clean(prompt)
