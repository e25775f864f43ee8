"""Where the key comes from, and what counts as entropy."""

import uuid

import pytest

from lens_core.errors import ConfigError
from lens_core.identity import RunKey, random_run_key, run_key_from_environment

UUID = str(uuid.UUID(int=0x1234567890ABCDEF1234567890ABCDEF))


@pytest.mark.parametrize(
    ("environ", "source"),
    [
        ({"NEMO_LENS_RUN_KEY": "0f" * 16}, "NEMO_LENS_RUN_KEY"),
        ({"NEMO_LENS_RUN_ID": f"llama-{UUID}"}, "NEMO_LENS_RUN_ID"),
        ({"TORCHELASTIC_RUN_ID": UUID}, "TORCHELASTIC_RUN_ID"),
        ({"TORCHELASTIC_RUN_ID": UUID.replace("-", "")}, "TORCHELASTIC_RUN_ID"),
        ({"K8S_JOB_UID": UUID, "TORCHELASTIC_RUN_ID": "none"}, "K8S_JOB_UID"),
    ],
)
def test_the_first_variable_with_entropy_is_the_key(environ, source):
    key = run_key_from_environment(environ)
    assert key is not None
    assert (key.source, key.agreed, key.attempt) == (source, True, 0)
    assert key == run_key_from_environment(dict(environ))


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"TORCHELASTIC_RUN_ID": "none"},
        {"NEMO_LENS_RUN_ID": "llama-7b"},
        {"SLURM_JOB_ID": "123456"},  # comes again on another cluster, and can be guessed
    ],
)
def test_a_name_or_a_job_number_is_no_entropy(environ):
    assert run_key_from_environment(environ) is None


def test_the_attempt_grows_with_every_kind_of_restart():
    attempts = [
        run_key_from_environment({"NEMO_LENS_RUN_KEY": "0f" * 16, **restarts}).attempt
        for restarts in (
            {},
            {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3"},
            {"SLURM_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3"},
        )
    ]
    assert attempts == sorted(set(attempts))


@pytest.mark.parametrize("text", ["abc", "0f" * 15, "xy" * 16])
def test_a_key_that_is_no_key_is_an_error_which_does_not_show_it(text):
    with pytest.raises(ConfigError) as caught:
        run_key_from_environment({"NEMO_LENS_RUN_KEY": text})
    assert text not in str(caught.value)


def test_a_short_secret_and_a_negative_attempt_are_refused():
    with pytest.raises(ConfigError):
        RunKey(b"short")
    with pytest.raises(ConfigError):
        RunKey(bytes(16), -1)


def test_the_secret_is_not_shown():
    one = random_run_key()
    assert one.secret.hex() not in repr(one)
    assert repr(one.secret) not in repr(one)
    assert not one.agreed


@pytest.mark.parametrize("secret", ["a" * 32, list(range(32)), None], ids=["str", "list", "None"])
def test_a_secret_that_is_no_bytes_is_refused_and_not_shown(secret):
    with pytest.raises(ConfigError, match="bytes") as caught:
        RunKey(secret)
    assert "aaaa" not in str(caught.value)


@pytest.mark.parametrize("attempt", [1.0, "1", None])
def test_an_attempt_that_is_no_integer_is_refused(attempt):
    with pytest.raises(ConfigError, match="attempt"):
        RunKey(bytes(16), attempt)
