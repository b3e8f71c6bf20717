"""Work before the first round and between two rounds: set-up, prunings, queries of callbacks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from lightning_fl.codecs import Dense
from lightning_fl.data import Source
from lightning_fl.engine.engine import Engine
from lightning_fl.engine.pretraining import ModuleLearner
from lightning_fl.link.link import Link
from lightning_fl.processes import of_rank_zero
from lightning_fl.pruning import Plan
from lightning_fl.slots import PruningTurn, SetupTurn
from lightning_fl.state.run_state import SETUP


def prepare(engine: Engine) -> None:
    """Take the turn before the first round, whose transfers count as set-up."""
    run = engine.run
    link = Link(engine.context, Dense(), Dense(), random=partial(run.random, SETUP))
    learner = ModuleLearner(
        engine.flat_module,
        engine.data,
        run.counters,
        link.ledger,
        engine.observer.on_prepared,
        engine.most_setup_steps,
    )
    server = engine.server_side(when="Before round 1")
    turn = SetupTurn(engine.context, engine.data, link, server, learner, run.params, run.buffers)
    engine.algorithm.prepare(turn)
    engine.setup_steps_left_out = learner.num_left_out
    run.finish_setup(
        of_rank_zero(engine.flat_module.fabric, turn.params),
        of_rank_zero(engine.flat_module.fabric, turn.buffers),
        turn.server.counters,
        turn.server.num_steps + learner.num_steps,
        link.ledger.round_bits,
    )
    if turn.mask is not None:
        engine.set_mask(turn.mask)


def broadcast_pruning(engine: Engine, plan: Plan) -> None:
    """Let the algorithm announce a structured pruning to the clients, and charge the next round for it."""
    if not engine.algorithm.exchange.uses_link:
        return
    run, cohort = engine.run, engine.roles.sample.select(engine.run)
    link = Link(engine.context, Dense(), Dense(), timed=cohort)
    engine.algorithm.broadcast_pruning(PruningTurn(plan, link, engine.context, cohort, run.params, run.buffers))
    run.ledger.add(link.ledger.round_bits, ahead=True)
    _sent_between(engine, link)


def sources(engine: Engine) -> list[Source]:
    """Return the holders of training samples, for callbacks that query them about the model; see `charge_queries`."""
    if not engine.algorithm.exchange.uses_link:
        return engine.data.sources()
    return [replace(source, on_answer=partial(_record_query, engine)) for source in engine.data.sources()]


def _record_query(engine: Engine, client: int, count: int) -> None:
    for observer in engine.roles.observers:
        observer.asked(client)
    engine.queries.record(client, count, engine.model_message())


def charge_queries(engine: Engine) -> None:
    """Charge the next round for the queries of callbacks to clients."""
    if engine.queries.counts:
        context = engine.context
        recipients = engine.algorithm.exchange.recipients(engine.roles.sample.select(engine.run), context)
        charged = set(Link(context, Dense(), engine.algorithm.downlink).charged(recipients))
        _sent_between(engine, engine.queries.charge(engine.run.ledger, context, charged))


def _sent_between(engine: Engine, link: Link) -> None:
    """Tell what stands around the rounds of messages between two of them."""
    for observer in engine.roles.observers:
        observer.sent_between(link)
