"""One round of federated learning: cohort, broadcast, local training, upload, aggregation, server steps."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import replace
from itertools import count

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fl.clients.client_job import ClientJob
from lightning_fl.clients.shown_models import show
from lightning_fl.engine.engine import Engine
from lightning_fl.engine.population import Cohort
from lightning_fl.engine.roles import Round
from lightning_fl.engine.round_record import round_record
from lightning_fl.engine.server_side import ServerSide
from lightning_fl.engine.server_steps import take_steps
from lightning_fl.engine.upload_collector import UploadCollector
from lightning_fl.link.link import Link
from lightning_fl.processes import of_rank_zero, share_states
from lightning_fl.slots import Merging, Message, RoundContext, ServerTurn
from lightning_fl.state.outcome import Outcome, Proposal, maximum
from lightning_fl.state.run_state import SERVER
from lightning_fl.vectors.pieces import converted, narrowed


def train_round(engine: Engine) -> dict[str, float]:
    """Train one round; returns its numbers by their column names in `metrics.csv`."""
    run, method, context, roles = engine.run, engine.algorithm, engine.context, engine.roles
    cohort, work = engine.cohort, engine.work
    server = engine.server_side(context)
    for observer in roles.observers:
        observer.begin_round(run, server)
    link, collector = engine.open_link(cohort, context), UploadCollector(engine, context)
    provided = _take_uploads(engine, roles.broadcast(link, cohort), cohort, link, collector)
    merged, outcome = collector.finish(cohort, link)
    averages = _averages(engine, cohort, outcome, collector)
    trained = work.counts(cohort.answering, engine.network.macs)  # before the run goes on to the next round
    finished = Round(run, cohort, link, outcome, work, averages, collector.merging.metrics)
    run.book(roles.costs(finished), link)
    if not collector.merging.is_skipped:
        turn = roles.reveal(_server_turn(engine, context, server, outcome, merged, provided, collector.merging))
        del merged, provided  # so that steps may let go of what they have used
        # Steps may let the module draw, as FedDF's student with dropout does.
        engine.flat_module.generators.seed(run.torch_seeds(SERVER)[1])
        untrained = engine.flat_module.layout.slices(engine.flat_module.untrained)
        proposal = take_steps(method, roles, turn, run.server, untrained)
        finished = replace(finished, proposal=proposal)
        del turn, proposal
    columns: dict[str, float] = {}
    for observer in roles.observers:
        own = observer.end_round(finished)
        engine.of_clients |= dict.fromkeys(
            own.keys() - observer.public, f"{type(observer).__name__} reports of clients"
        )
        columns |= own
    _commit(engine, finished.proposal, outcome, collector)
    return round_record(finished, engine.network, trained, columns)


def _take_uploads(engine: Engine, job: ClientJob, cohort: Cohort, link: Link, collector: UploadCollector) -> Message:
    """Train the clients and take their uploads; returns what the exchange provides to the server's steps.

    What clients need for their training, besides the model, is not kept any longer than this.
    """
    exchange, roles = engine.algorithm.exchange, engine.roles
    selected, answering = cohort.selected, cohort.answering
    job = replace(job, data=engine.data, selected=selected, answering=answering, accepted=collector.outcome)
    # A client that sends twice in a round goes on from what it keeps of its first upload.
    link.client_memory = ChainMap(collector.outcome.memory, link.client_memory)  # type: ignore[arg-type]
    job, clients = exchange.before_training(job, cohort.mine, roles.train, link)
    if engine.group is not None:  # only its first process has seen what the clients sent
        clients = engine.group.gather(clients)[0]
    positions = count(1)
    for upload in roles.collect(roles.train(job, clients), link):
        upload.result.state = engine.algorithm.rule.arrived(upload.result.state, upload.message)
        collector.take(upload, link)
        show(engine.flat_module, upload.result.trained)
        engine.observer.on_upload(upload.result.client, next(positions), len(clients))
        del upload  # before the next client trains, as `enumerate` would not
    link.received = {}
    engine.flat_module.gradient.release()
    for observer in roles.observers:
        observer.trained(job)
    return {name: job.received[name] for name in exchange.provides if name in job.received}


def _averages(engine: Engine, cohort: Cohort, outcome: Outcome, collector: UploadCollector) -> dict[str, float]:
    """Return the averages of what the module has logged while accepted clients trained."""
    logs = engine.flat_module.logs
    client_logs = [outcome.logs[k] for k in dict.fromkeys(cohort.answering) if k in outcome.logs]
    averages = logs.averages(client_logs, collector.known)
    names = (each for name in averages for each in (name, *logs.suffixed.get(name, ())))
    engine.of_clients |= dict.fromkeys(names, "is logged while clients train")
    return averages


def _server_turn(
    engine: Engine,
    context: RoundContext,
    server: ServerSide,
    outcome: Outcome,
    merged: Message,
    provided: Message,
    merging: Merging,
) -> ServerTurn:
    """Return the turn that the first of the server's steps gets, in the memory of the merged message."""
    run = engine.run
    dtypes = {"buffers": run.buffers.dtype}
    is_alone = len({vector.data_ptr() for vector in merged.values()}) == len(merged)  # no vector has two names
    change = narrowed if is_alone else converted
    message = {
        name: function(vector, dtypes.get(name, run.params.dtype))
        for function, entries in ((change, merged), (converted, provided))
        for name, vector in entries.items()
    }
    return ServerTurn(
        context=context,
        server=replace(server, counters=maximum(run.counters, outcome.counters)),
        round=run.round,
        clients=sorted(outcome.logs),
        num_samples=outcome.num_samples,
        shared=engine.algorithm.share(run.server),
        params=run.params,
        buffers=run.buffers,
        merged=message,
        proposal=run.params,
        proposed_buffers=run.buffers,
        mask=run.mask,
        uploaders=merging.uploaders,
    )


def _commit(engine: Engine, proposal: Proposal | None, outcome: Outcome, collector: UploadCollector) -> None:
    """End the round; unless it is undone, store the server's proposal and the clients' states in the run."""
    run, fabric = engine.run, engine.flat_module.fabric
    if collector.has_drifted:
        _say_drifted(engine)
    if proposal is None or proposal.is_undone:
        run.end_round()
        return
    # Every process may have merged the uploads itself, or steps on another kind of GPU: rounding must not make models differ.
    if collector.shares_uploads or engine.has_drifted:
        proposal = replace(
            proposal,
            params=of_rank_zero(fabric, proposal.params),
            buffers=of_rank_zero(fabric, proposal.buffers),
        )
    state_forms, memory_forms = collector.forms or (None, None)
    run.commit(
        proposal,
        share_states(fabric, outcome.states, state_forms),
        share_states(fabric, outcome.memory, memory_forms),
    )
    if run.keeps_files:
        fabric.barrier()  # one process of a machine writes the files that the others read
    if proposal.mask is not None and proposal.mask is not run.mask:
        engine.set_mask(proposal.mask)


def _say_drifted(engine: Engine) -> None:
    """Warn once that the processes have begun a round with different models."""
    if not engine.has_drifted:
        rank_zero_warn(
            f"Round {engine.run.round + 1}: the processes began with different models, most likely because they "
            "compute on different kinds of accelerators; from now on all use the model of process 0 after each round."
        )
    engine.has_drifted = True
