"""Python's log records arrive, once, with their span, and nothing recurses."""

import subprocess
import sys
import textwrap

import pytest

from tests.telemetry.harness import attributes, environment, receiving, run

START = "import logging, logging.config\nfrom lens_core import setup_logging_bridge\n"


def logged(code, tmp_path, **extra):
    """What arrived from a process: records, resources, stderr."""
    with receiving() as receiver:
        returned, _, err = run(
            START + textwrap.dedent(code), environment(tmp_path, receiver.endpoint, **extra)
        )
        assert returned == 0, err
        return receiver.logs(), receiver.spans(), err


def bodies(records):
    return [record.body.string_value for record, _ in records]


def test_subsystem_info_and_correlation(tmp_path):
    code = """
        setup_logging_bridge(logger_name="megatron.training")
        log = logging.getLogger("megatron.training.loop")
        with tracer.start_as_current_span("step"):
            log.info("step %d done", 3, extra={"tokens_seen": 5, "hf_token": "s"})
        log.debug("not asked for")
        logging.getLogger("other").error("of another subsystem")
        try:
            raise ValueError("password=hunter2")
        except ValueError:
            log.exception("failed")
        handle.shutdown()
        log.info("after shutdown")
    """
    records, spans, _ = logged(code, tmp_path)
    assert bodies(records) == ["step 3 done", "failed"]
    first, resource = records[0]
    (span, _) = spans[0]
    assert (first.trace_id, first.span_id) == (span.trace_id, span.span_id)
    assert (first.severity_text, first.severity_number) == ("INFO", 9)
    values = attributes(first.attributes)
    assert (values["tokens_seen"], values["hf_token"]) == (5, "[redacted]")
    assert values["code.function.name"] == "<module>"
    assert resource["nemo.run.id"] == "run"
    failed = attributes(records[1][0].attributes)
    assert failed["exception.type"] == "ValueError"
    assert "hunter2" not in str(failed)


def test_variable_bridges_the_root(tmp_path):
    code = "logging.getLogger('anything').info('hello')"
    records, _, _ = logged(code, tmp_path, NEMO_LENS_LOGS_ENABLED=1)
    assert bodies(records) == ["hello"]


def test_once_per_record_however_often_it_is_set_up(tmp_path):
    code = """
        for _ in range(3):
            setup_logging_bridge()
        setup_logging_bridge("a", logging.DEBUG)
        setup_logging_bridge("a.b")
        logging.getLogger("a.b.c").warning("one")
        logging.getLogger("a").debug("two")
        logging.getLogger("c").debug("not asked for")
    """
    records, _, _ = logged(code, tmp_path)
    assert bodies(records) == ["one", "two"]


@pytest.mark.parametrize("name", ["", "megatron"])
def test_survives_dict_config(name, tmp_path):
    code = f"""
        from logging.config import dictConfig
        child = logging.getLogger("megatron.training")
        setup_logging_bridge({name!r})
        dictConfig({{"version": 1, "root": {{"level": "WARNING", "handlers": []}}}})
        logging.getLogger("megatron").info("after dictConfig")
        logging.basicConfig(level="WARNING", force=True)
        time.sleep(1.5)
        logging.getLogger("megatron").info("after basicConfig")
    """
    records, _, _ = logged(code, tmp_path)
    assert bodies(records) == ["after dictConfig", "after basicConfig"]


def test_nothing_recurses(tmp_path):
    """All at DEBUG, with HTTP client and telemetry logging too, and a record that cannot be."""
    code = """
        setup_logging_bridge(level=logging.DEBUG)
        logging.getLogger("opentelemetry.sdk").error("of the SDK")
        logging.getLogger("lens_core").error("of this library")
        logging.getLogger("app").info("value", extra={"bad": object(), "worse": {1: {2: object}}})
        from opentelemetry.trace import get_current_span
        for _ in range(3):
            handle.tracer.start_span("x").end()
        time.sleep(0.5)
    """
    records, _, err = logged(
        code, tmp_path, OTEL_BSP_SCHEDULE_DELAY=50, OTEL_BLRP_SCHEDULE_DELAY=50
    )
    assert bodies(records) == ["value"], bodies(records)
    assert "RecursionError" not in err


def test_flushed_at_exit_with_warnings_as_errors(tmp_path):
    code = START + textwrap.dedent(
        """
        from lens_core import NemoLensConfig, setup_telemetry
        handle = setup_telemetry(NemoLensConfig.from_env())
        setup_logging_bridge("app")
        logging.getLogger("app").info("last words")
        """
    )
    with receiving() as receiver:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            env=environment(tmp_path, receiver.endpoint),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert bodies(receiver.logs()) == ["last words"]


def test_disabled_and_before_set_up(tmp_path):
    code = """
        assert not handle.is_exporting
        setup_logging_bridge("app")
        logging.getLogger("app").info("x")
    """
    with receiving() as receiver:
        env = environment(tmp_path, receiver.endpoint, NEMO_LENS_ENABLED=0)
        returned, _, err = run(START + textwrap.dedent(code), env)
        assert (returned, err) == (0, "")
        assert receiver.logs() == []


def test_levels_are_put_back(tmp_path):
    code = """
        root = logging.getLogger()
        assert root.level == logging.WARNING
        setup_logging_bridge()
        assert root.level == logging.INFO
        handle.shutdown()
        assert root.level == logging.WARNING and not root.handlers
    """
    logged(code, tmp_path)


def test_what_the_user_sees_stays_as_it_was(tmp_path):
    """A bridge is a handler, and where there is one Python neither configures nor helps itself."""
    code = """
        logging.getLogger("a").warning("on the last resort")
        logging.getLogger("a").info("not there")
        setup_logging_bridge("a.b")
        logging.getLogger("a.b.c").error("once")
        logging.basicConfig(level=logging.INFO, format="configured %(message)s")
        logging.getLogger("a.b").info("two")
        logging.basicConfig(level=logging.INFO, format="again %(message)s")
        handle.shutdown()
        logging.getLogger("a").info("after")
    """
    records, _, err = logged(code, tmp_path, NEMO_LENS_LOGS_ENABLED=1)
    assert bodies(records) == ["on the last resort", "not there", "once", "two"]
    assert err.splitlines() == ["on the last resort", "once", "configured two", "configured after"]


def test_a_level_that_is_not_sent_is_still_seen(tmp_path):
    code = """
        setup_logging_bridge("a", logging.ERROR)
        logging.getLogger("a").warning("seen")
    """
    records, _, err = logged(code, tmp_path)
    assert (bodies(records), err) == ([], "seen\n")


def test_basic_config_is_python_s_own_after_shutdown(tmp_path):
    code = """
        own = logging.basicConfig
        setup_logging_bridge()
        assert logging.basicConfig is not own
        handle.shutdown()
        assert logging.basicConfig is own
    """
    logged(code, tmp_path)


def test_the_last_record_is_not_kept(tmp_path):
    """Its exception's frames would keep the user's tensors."""
    code = """
        import gc, weakref
        setup_logging_bridge("a")
        class Tensor: pass
        def fail():
            tensor = Tensor()
            try:
                raise RuntimeError("out of memory")
            except RuntimeError:
                logging.getLogger("a").exception("retrying")
            return weakref.ref(tensor)
        gc.disable()
        assert fail()() is None
    """
    records, _, _ = logged(code, tmp_path)
    assert bodies(records) == ["retrying"]


def test_text_that_utf8_cannot_hold(tmp_path):
    code = """
        try:
            raise ValueError("file \\udcff")
        except ValueError:
            logging.getLogger("a").exception("bad name \\udcff")
        logging.getLogger("a").warning("good")
    """
    records, _, err = logged(code, tmp_path, NEMO_LENS_LOGS_ENABLED=1)
    assert bodies(records) == ["bad name ?", "good"], err
    assert attributes(records[0][0].attributes)["exception.message"] == "file ?"
