"""Pictures of benchmark rows are PNG files."""

from benchmarks.plots import decoding_png


def test_the_picture_of_decoding_is_png():
    signature = b"\x89PNG\r\n\x1a\n"
    steps = [
        {"case": "one token", "backend": backend, "pattern": "Causal()", "tokens": tokens}
        | {"tokens_per_second": 1e6 / tokens, "bytes": 4096 * tokens}
        for tokens in (1024, 2048)
        for backend in ("cache", "dense", "attention, one length")
    ]
    assert decoding_png([*steps, {"case": "prompt in parts"}], title="").startswith(signature)
