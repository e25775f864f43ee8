"""What each kind of diagnostic means to the person who reads it; the rest is read from the code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind, explained.

    Attributes:
        meaning: What happened, and what that costs.
        why_none: Why one of its calls has no remedy: a key of :data:`NO_REMEDY`, or a sentence.
    """

    meaning: str
    why_none: str = ""


#: Reasons that several kinds share.
NO_REMEDY: Final = {
    "foreign": "the exception in the line comes from a provider, processor, sampler, propagator or "
    "value of the application; only who wrote that can mend it.",
    "ours": "the code that recorded it has gone on without; an exception there is a fault of this "
    "library: report it with the line.",
    "passes": "what could not be done is tried again, or is done by another process.",
}

_SPAN_LOST: Final = "the code inside runs as if it were not traced"

KINDS: Final[dict[str, Kind]] = {
    "SIGNAL.close_failed": Kind(
        "A sink of this signal could not be closed at shutdown; what it had taken may be "
        "incomplete.",
        "foreign",
    ),
    "SIGNAL.crowded": Kind(
        "More is recorded than the receiver takes: batches go to a file of the run directory."
    ),
    "SIGNAL.dropped": Kind(
        "Records were dropped: more came than were sent, or they came after shutdown."
    ),
    "SIGNAL.export_failed": Kind(
        "A batch could not be sent, was kept, and is tried again.", "foreign"
    ),
    "SIGNAL.lost": Kind("A batch could neither be sent nor be written to a file: it is gone."),
    "attributes.failed": Kind(
        "An attribute's value could not be read or set; the span is there without it.", "foreign"
    ),
    "autotrace.failed": Kind(
        "A hook of the tracing of unmodified scripts failed once; the step has not noticed.",
        "ours",
    ),
    "autotrace.hook_off": Kind(
        "A private name of torch is missing that a hook of the tracing of unmodified scripts "
        "needs: that hook is off, and the others are on."
    ),
    "broadcast.no_headers": Kind(
        "The source of `broadcast_trace_context` has a span, and its propagators wrote no header "
        "that fits a frame: all ranks get `None`."
    ),
    "broadcast.no_span": Kind(
        "The source of `broadcast_trace_context` has no span: all ranks get `None`."
    ),
    "carrier.inject_failed": Kind(
        "A context could not be written on a message; the message went without one."
    ),
    "carrier.out_of_turn": Kind(
        "A frame of another call than this one arrived; no link is made from it."
    ),
    "carrier.rejected": Kind(
        "What arrived is no carrier (damaged bytes, wrong types, too large). The receiver has no "
        "context, never a wrong one.",
    ),
    "carrier.truncated": Kind(
        "Baggage or tracestate did not fit the frame and was left out; the trace is complete."
    ),
    "carrier.underivable": Kind(
        "A message should have carried a derived context, and was sent under another span: its "
        "receiver has no link."
    ),
    "config.contradicted": Kind(
        "A rank or world size was given by hand that is not what torchrun says; the given one is "
        "used."
    ),
    "config.invalid": Kind(
        "A setting has a value that is not allowed; its default is used. Each such setting is "
        "named once."
    ),
    "control.failed": Kind(
        "A task of the background thread (live span groups, end of the process) failed once.",
        "ours",
    ),
    "groups.not_live": Kind("Live span groups were asked for, and their file cannot be watched."),
    "groups.unknown_site": Kind("A site's span group is one that nobody registered."),
    "groups.unknown": Kind("A span group or preset that was asked for is not registered."),
    "hop.sequence_mismatch": Kind(
        "A frame says that it belongs to another message than the derived link: the link is left "
        "out."
    ),
    "identity.absent_ranks": Kind(
        "Some ranks start no spans under derived ids. Spans of theirs are not linked to."
    ),
    "identity.bad_key": Kind("A rank has a run key that is none; that of rank 0 is used."),
    "identity.foreign_generator": Kind(
        "A span that should have had a derived id got another one from the provider's own id "
        "generator."
    ),
    "identity.random": Kind(
        "This rank has no run key that it shares with the others. Its steps and hops have random "
        "ids, `lens.identity = random`, and no links to other ranks."
    ),
    "identity.sampler_differs": Kind("Ranks decide differently which traces are sampled."),
    "journal.deleted": Kind("The journal of this process was deleted while it was in use."),
    "journal.failed": Kind(
        "A span, or a sign of life, could not be written into the journal.", "ours"
    ),
    "journal.network_file_system": Kind("The journal is on a network file system: it may be slow."),
    "journal.no_stacks": Kind(
        "The stacks of this process cannot be written when it hangs or crashes.",
        "`faulthandler` refused its file; the journal itself is whole.",
    ),
    "journal.overflow": Kind(
        "The journal has no room for a span; that one does not survive a SIGKILL."
    ),
    "journal.pointer": Kind("The run's directory does not say where this host's journals are."),
    "journal.recovery": Kind(
        "What killed processes left could not all be recovered when this one started.", "passes"
    ),
    "journal.spill_failed": Kind("Ended spans stay in the journal, which fills up."),
    "journal.truncated": Kind("The journal of this process was cut while it was in use."),
    "journal.replaced": Kind(
        "Exporter `journal` could make no journal: spans go to a file of the run directory."
    ),
    "journal.unavailable": Kind(
        "There is no journal: spans of this process do not survive its being killed.",
        "in a forked child: its parent has said the same, with what to do.",
    ),
    "link.missing": Kind(
        "A span that was to link to another rank's has no link, since that rank's id cannot be "
        "derived or would not be that of a span."
    ),
    "metrics.bad_duration": Kind("A step was said to have taken a negative time, or no number."),
    "metrics.child_histogram": Kind(
        "A histogram of a forked child is left out, for its parent's numbers are in it.",
        "exponential histograms cannot be subtracted; use explicit buckets where children count.",
    ),
    "metrics.child_muted": Kind("A forked child exports no metrics.", "passes"),
    "metrics.collect_failed": Kind("Metrics could not be collected this time.", "foreign"),
    "metrics.failed": Kind("A training step could not be recorded as metrics.", "foreign"),
    "metrics.nonfinite": Kind(
        "A loss, gradient norm or throughput is NaN or infinite: `<metric>.finite` is 0.",
        "it is the training that says so, not telemetry.",
    ),
    "metrics.not_a_number": Kind("A value given to `record_training_step` is no number."),
    "metrics.not_encodable": Kind("A metric was left out of the export.", "foreign"),
    "otlp.partial_success": Kind(
        "The collector took the batch and rejected records in it; the line has its own reason."
    ),
    "otlp.refused": Kind(
        "The collector refused a batch: it is sent in halves, tried again, or kept in a file of "
        "the run directory; the line has the collector's own answer."
    ),
    "otlp.unreachable": Kind("The collector does not answer; batches are tried again, then kept."),
    "pipelining.absent": Kind("A rank of the pipeline is not instrumented like this one."),
    "pipelining.failed": Kind("A span or link of a pipeline schedule was left out.", "ours"),
    "pipelining.no_roll_call": Kind(
        "The ranks could not tell each other which pipeline they are in; links are made as if all "
        "were in it.",
        "the store of the process group does not answer; the log of the job says why.",
    ),
    "processor.failed": Kind("A span processor raised; the others have the span.", "foreign"),
    "processor.shutdown_failed": Kind("A span processor raised at shutdown.", "foreign"),
    "propagators.invalid": Kind("`OTEL_PROPAGATORS` names what is not installed."),
    "provider.foreign": Kind("The application has installed a provider, which is used instead."),
    "provider.invalid": Kind("OpenTelemetry gives no tracer provider; nothing is traced."),
    "ray.callee_unknown": Kind(
        "It could not be found out how a callee takes its arguments; the carrier goes by its name.",
        "the carrier arrives all the same; a new version of Ray keeps it elsewhere.",
    ),
    "ray.instrumentation_failed": Kind("`RayInstrumentor` does not know this version of Ray."),
    "ray.not_traced": Kind(
        "`RayInstrumentor` left one function or class as it was.",
        "the line says what about it cannot be traced.",
    ),
    "ray.setup_failed": Kind("A Ray worker could not set telemetry up."),
    "ray.span_failed": Kind(f"A span of a Ray call failed: {_SPAN_LOST}.", "foreign"),
    "ray.strict_decorator": Kind("A decorator around a traced function drops the context."),
    "run_id.agreement_failed": Kind(
        "The ranks could not agree on a run id; `run_id.random` follows.",
        "that of `run_id.random`.",
    ),
    "run_id.random": Kind("The spans of this run cannot be found by one run id."),
    "span.argument": Kind("A function that starts a span was called with a wrong argument."),
    "span.end_failed": Kind("A span could not be ended as it should be.", "foreign"),
    "span.failed": Kind(f"A span could not be started: {_SPAN_LOST}.", "foreign"),
    "span.record_failed": Kind("An exception could not be recorded on its span.", "foreign"),
    "span.truncate_failed": Kind("A span that was open at the end could not be ended.", "foreign"),
    "store_context.disabled": Kind("Contexts are no longer shared through the store."),
    "store_context.too_many_readers": Kind("Contexts are not shared through the store at all."),
}
