"""Test that tests stand behind each row of the tables in docs/federates.md."""

import pytest
from tested_rows import TESTS, check_rows, check_tests, first_cells

PAGE = TESTS.parent / "docs" / "federates.md"

FLAT, HOOKS, LOGS = "flat_module/test_flat_module.py", "flat_module/test_hooks.py", "flat_module/test_module_logs.py"
OPTIMISERS, SCHEDULERS = "flat_module/test_stock_optimizers.py", "flat_module/test_stock_schedulers.py"
LENGTHS = "flat_module/test_schedule_lengths.py"
BUFFERS = "flat_module/test_buffers.py"
FACE, STOCK, BATCHES = (
    f"trainer/{name}.py" for name in ("test_trainer_face", "test_stock_parts", "test_batches_and_loaders")
)
UNFREEZING = "engine/test_follow_unfreezing.py"
MANUAL = "flat_module/test_manual_optimization.py"
COMPILED = "trainer/test_compiled_modules.py"
LIGHTNING, OWN_LOADERS = "trainer/test_lightning_runner.py", "trainer/test_own_loaders.py"
MODEL_PRUNING = "trainer/test_model_pruning.py"
RULES = "trainer/test_rules_in_steps.py"
CONTRACT = "evaluation/test_lightnings_contract.py"
OTHER_NAME = "trainer/test_pytorch_lightning.py"
OF_OTHERS = "flat_module/test_optimizers_of_others.py"
WRAPPED, DROPPED = "data/test_wrapped_datamodule.py", "data/test_drop_last.py"
ROWS = {  # the tests by the row's first words
    "`training_step` that": [
        (BATCHES, "test_any_structure_of_batches"),
        (HOOKS, "test_what_the_last_hook_of_a_step_gets"),
    ],
    "modules, data modules, callbacks and loggers": [
        (OTHER_NAME, "test_both_names_train_alike"),
        (OTHER_NAME, "test_runs_resume"),
        (OTHER_NAME, "test_the_command_line_says_what_to_do"),
    ],
    "`validation_step`, `test_step`": [(STOCK, "test_evaluation_by_hand"), (BATCHES, "test_any_validation_loaders")],
    "`trainer.current_epoch`": [(HOOKS, "test_hooks_come_in_the_same_order")],
    "one optimiser, of torch": [
        (OPTIMISERS, "test_optimisers_are_those_of_a_stock_trainer"),
        (OPTIMISERS, "test_sparse_adam_needs_sparse_gradients"),
        (FLAT, "test_every_client_starts_with_a_fresh_optimiser"),
        (OF_OTHERS, "test_each_client_begins_with_an_optimiser_made_anew"),
        (OF_OTHERS, "test_what_a_hook_changes_between_rounds_stays"),
    ],
    "an optimiser without a learning rate": [
        (OF_OTHERS, "test_an_optimiser_without_a_learning_rate_is_refused"),
        (OF_OTHERS, "test_an_optimiser_around_another_is_refused_for_personal_parameters"),
    ],
    "no `configure_optimizers`": [
        ("cli/test_own_classes.py", "test_a_module_without_an_optimizer_takes_that_of_the_command_line")
    ],
    "LBFGS": [
        ("flat_module/test_optimizer.py", "test_an_optimiser_that_wants_a_closure_is_refused"),
        (LIGHTNING, "test_a_round_of_one_client_is_an_epoch_of_lightnings_trainer"),
        (RULES, "test_an_optimiser_with_a_closure_is_refused"),
    ],
    "several optimisers, or none": [
        (FLAT, "test_modules_that_cannot_be_federated_are_refused"),
    ],
    "an optimiser other than SGD": [
        (FLAT, "test_modules_that_cannot_be_federated_are_refused"),
        ("flat_module/test_client_optimizer.py", "test_methods_with_steps_of_their_own_take_any_module"),
        ("flat_module/test_client_optimizer.py", "test_the_modules_schedulers_move_sgd"),
    ],
    "schedulers of interval `epoch`": [
        (SCHEDULERS, "test_rounds_are_epochs_of_a_stock_trainer"),
        (SCHEDULERS, "test_a_scheduler_of_the_users_watches_a_metric"),
    ],
    "schedulers of interval `step`": [
        (SCHEDULERS, "test_step_wise_schedulers_start_from_the_rates_of_the_round"),
        (SCHEDULERS, "test_a_frequency_counts_batches"),
    ],
    "a schedule longer": [(LENGTHS, "test_a_schedule_longer_than_a_local_training_is_said_once")],
    "`OneCycleLR` with": [
        (LENGTHS, "test_too_few_steps_for_a_client_are_refused"),
        (LENGTHS, "test_too_few_steps_for_the_rounds_are_refused"),
    ],
    "`ReduceLROnPlateau` of": [(SCHEDULERS, "test_a_plateau_of_steps_is_refused")],
    "manual optimisation (": [
        (MANUAL, "test_one_client_is_a_stock_trainer"),
        (MANUAL, "test_methods_that_read_the_weights_train_and_resume"),
        (MANUAL, "test_clients_start_with_fresh_optimisers"),
        (MANUAL, "test_two_processes_train_as_one"),
    ],
    "schedulers beside": [
        (MANUAL, "test_schedulers_that_a_module_steps_are_those_of_a_stock_trainer"),
        (MANUAL, "test_every_client_starts_with_the_schedulers_of_the_round"),
        (MANUAL, "test_a_resumed_run_goes_on_with_its_schedulers"),
    ],
    "a scheduler without": [(MANUAL, "test_a_scheduler_that_cannot_go_on_with_the_optimizers_is_refused")],
    "manual optimisation with": [
        (MANUAL, "test_what_does_not_reach_manual_steps_is_refused"),
        (MANUAL, "test_every_method_is_allowed_or_refused_in_a_sentence"),
        (MANUAL, "test_clients_are_not_fine_tuned_at_a_rate_that_the_module_moves"),
    ],
    "its own `backward`": [
        (FLAT, "test_modules_that_cannot_be_federated_are_refused"),
        (HOOKS, "test_hooks_that_make_the_step_need_lightnings_loop"),
        (LIGHTNING, "test_a_round_of_one_client_is_an_epoch_of_lightnings_trainer"),
        (LIGHTNING, "test_what_it_cannot_train_is_refused"),
        (RULES, "test_a_module_that_changes_its_steps_trains_as_a_plain_loop"),
        (RULES, "test_a_method_with_further_gradients_or_models_is_refused"),
    ],
    "all other hooks": [
        (HOOKS, "test_hooks_come_in_the_same_order"),
        (HOOKS, "test_hooks_of_an_object_are_called_as_those_of_its_class"),
        (HOOKS, "test_checkpoint_hooks_come_in_the_same_order"),
        ("clients/test_stacked.py", "test_what_stands_in_the_way_is_named_at_once"),
    ],
    "`on_train_batch_start` that": [
        (HOOKS, "test_clients_skip_no_rest_of_an_epoch"),
        (LIGHTNING, "test_a_round_of_one_client_is_an_epoch_of_lightnings_trainer"),
    ],
    "parameters that a hook freezes": [
        ("flat_module/test_missing_gradients.py", "test_a_layer_that_a_hook_freezes_stays_as_it_is")
    ],
    "parameters that a hook or callback unfreezes": [
        (UNFREEZING, "test_goes_on_as_a_run_whose_states_were_extended_by_hand"),
        (UNFREEZING, "test_resumed_runs_go_on_with_the_layers_and_groups_of_callbacks"),
    ],
    "an optimiser that a hook replaces": [
        ("flat_module/test_replaced_optimizers.py", "test_clients_follow_an_optimiser_of_the_same_class"),
        ("flat_module/test_replaced_optimizers.py", "test_others_are_refused"),
    ],
    "unfreezing and new groups with methods": [
        (UNFREEZING, "test_methods_whose_states_cannot_follow_refuse_by_name"),
        (UNFREEZING, "test_what_no_state_of_the_run_could_follow_is_refused"),
    ],
    "parameters that are the optimiser's": [(FLAT, "test_what_no_message_would_carry_does_not_train")],
    "a step in which a parameter has no gradient": [
        ("flat_module/test_missing_gradients.py", "test_one_client_makes_the_steps_of_lightning"),
        ("flat_module/test_missing_gradients.py", "test_a_stack_makes_the_same_steps_or_refuses"),
    ],
    "frozen parameters that move": [("trainer/test_frozen_weights.py", "test_frozen_weights_move_between_rounds_only")],
    "`nn.Embedding(padding_idx": [("clients/test_stacked.py", "test_clients_leave_the_padding_of_an_embedding_alone")],
    "frozen parameters": [(FLAT, "test_frozen_parameters_are_neither_trained_nor_sent")],
    "tied parameters": [(FLAT, "test_tied_parameters_stay_tied_and_are_sent_once")],
    "float buffers": [(BUFFERS, "test_each_buffer_is_averaged_counted_kept_or_refused")],
    "integer and boolean buffers": [(BUFFERS, "test_each_buffer_is_averaged_counted_kept_or_refused")],
    "integer and boolean buffers of": [
        (BUFFERS, "test_each_buffer_is_averaged_counted_kept_or_refused"),
        (BUFFERS, "test_a_client_keeps_the_buffers_that_are_named"),
    ],
    "buffers with `persistent=False`": [
        (BUFFERS, "test_each_buffer_is_averaged_counted_kept_or_refused"),
        ("callbacks/test_adapters.py", "test_buffers_that_are_not_saved_are_not_sent"),
        ("callbacks/test_adapters.py", "test_what_a_client_writes_to_an_unsaved_buffer_reaches_no_other"),
    ],
    "numbers, texts, lists, tensors": [
        ("flat_module/test_own_objects.py", "test_only_the_federations_own_steps_count"),
        ("flat_module/test_plain_attributes.py", "test_what_clients_pass_on_is_said_once"),
        ("flat_module/test_plain_attributes.py", "test_trials_of_stacks_restore_attributes"),
    ],
    "parameters of several dtypes": [(FLAT, "test_parameters_of_several_dtypes_are_refused")],
    "complex parameters": [
        (FLAT, "test_a_complex_buffer_is_refused_before_training"),
        (FLAT, "test_a_buffer_that_changes_its_shape_is_refused_by_name"),
    ],
    "layers that `setup`": [
        ("trainer/test_checkpointing.py", "test_a_module_is_built_from_the_checkpoint_that_it_resumes"),
        (HOOKS, "test_the_old_name_of_configure_model"),
    ],
    "`torch.compile(module)`": [
        (COMPILED, "test_a_compiled_module_is_not_compiled_again_and_again_and_trains_as_the_module"),
        (COMPILED, "test_a_stack_of_compiled_modules_computes_without_the_compiler_and_says_so"),
        (COMPILED, "test_a_compiled_module_is_pruned_as_the_module"),
    ],
    "lazy layers": [(FLAT, "test_a_lazy_layer_is_refused_until_it_has_run")],
    # self.log
    "a value": [
        (LOGS, "test_means_are_by_samples_over_steps_and_clients"),
        (LOGS, "test_a_batch_size_that_is_given_is_the_weight"),
    ],
    "`on_step=True`": [
        (LOGS, "test_flags_of_log"),
        (LIGHTNING, "test_single_steps_reach_loggers_and_callbacks"),
    ],
    "`on_step=True, on_epoch=True`": [(LOGS, "test_names_with_suffix_of_several_clients")],
    "`reduce_fx`": [(LOGS, "test_other_reductions_see_all_values_of_the_round")],
    "a `Metric`": [
        (LOGS, "test_torchmetrics_objects_see_every_training_batch_once"),
        (LOGS, "test_metrics_that_share_their_states_start_anew_in_every_round"),
    ],
    "in validation and test": [
        (CONTRACT, "test_values_do_not_depend_on_the_hook_that_logs_them"),
        (CONTRACT, "test_callbacks_log_and_read_metrics_as_in_lightning"),
        (CONTRACT, "test_each_of_several_loaders_is_measured_with_personal_values_of_clients"),
    ],
    "several validation loaders": [(LOGS, "test_several_validation_loaders_have_their_own_names")],
    # names of the trainer
    "`global_step`": [
        (FACE, "test_the_global_step_counts_a_clients_own_steps"),
        (FACE, "test_checkpoints_keep_the_steps_of_all_clients_in_their_names"),
    ],
    "`num_training_batches`": [
        (FACE, "test_one_client_with_all_data_reads_what_a_stock_trainer_reads"),
        (OWN_LOADERS, "test_a_single_client_reads_any_loader_as_lightnings_trainer_does"),
        (
            "flat_module/test_optimizer.py",
            "test_loader_and_number_of_batches_are_unknown_in_setup_until_they_are_wanted",
        ),
    ],
    "`estimated_stepping_batches`": [
        ("flat_module/test_optimizer.py", "test_modules_may_ask_how_many_steps_there_will_be"),
        ("flat_module/test_optimizer.py", "test_the_number_of_steps_is_known_from_setup_on"),
        ("flat_module/test_optimizer.py", "test_a_single_client_reads_lightnings_number_of_steps"),
        ("flat_module/test_optimizer.py", "test_a_number_of_steps_that_changes_after_setup_is_refused"),
    ],
    "`fit_loop.batch_idx`": [
        (FACE, "test_the_loop_counts_the_batches_of_a_client"),
        (FACE, "test_one_client_with_all_data_reads_what_a_stock_trainer_reads"),
    ],
    "`fit_loop.total_batch_idx`": [
        (FACE, "test_the_loop_counts_the_batches_of_a_client"),
        (FACE, "test_one_client_with_all_data_reads_what_a_stock_trainer_reads"),
    ],
    "`fit_loop.epoch_progress`": [(FACE, "test_the_first_round_is_not_set_by_hand")],
    "`max_steps`, `min_steps`": [
        ("trainer/test_max_steps.py", "test_one_client_makes_the_steps_of_lightning"),
        ("trainer/test_max_steps.py", "test_the_last_round_has_the_steps_that_are_left"),
        ("trainer/test_max_steps.py", "test_min_steps_lets_a_stopped_run_go_on"),
    ],
    "`is_last_batch`": [(FACE, "test_one_client_with_all_data_reads_what_a_stock_trainer_reads")],
    "`train_dataloader`": [
        (FACE, "test_one_client_with_all_data_reads_what_a_stock_trainer_reads"),
        (OWN_LOADERS, "test_the_trainer_shows_the_loader_of_the_client_in_training"),
    ],
    "`val_dataloaders`": [(FACE, "test_one_client_with_all_data_reads_what_a_stock_trainer_reads")],
    "`log_every_n_steps`": [(FACE, "test_one_client_with_all_data_reads_what_a_stock_trainer_reads")],
    "`distributed_sampler_kwargs`": [(FACE, "test_one_client_with_all_data_reads_what_a_stock_trainer_reads")],
    "`logger`": [(CONTRACT, "test_the_users_logger_is_the_modules")],
    "`checkpoint_callback`": [
        ("trainer/test_federated_trainer.py", "test_the_checkpoint_callback_names_the_last_checkpoint"),
        ("trainer/test_checkpointing.py", "test_loggers_are_offered_the_final_model_or_those_of_a_model_checkpoint"),
    ],
    # callbacks
    "`EarlyStopping`": [
        (STOCK, "test_early_stopping_stops"),
        (STOCK, "test_the_best_checkpoint_is_kept_and_found"),
        (STOCK, "test_callbacks_that_need_nothing_special"),
    ],
    "`LearningRateMonitor`": [
        (FACE, "test_a_learning_rate_monitor_of_steps_logs_once_a_round"),
        (LIGHTNING, "test_callbacks_that_log_steps_work"),
    ],
    "`DeviceStatsMonitor`": [(LIGHTNING, "test_callbacks_that_log_steps_work")],
    "`ModelCheckpoint(every": [(FACE, "test_a_checkpoint_every_few_steps_or_seconds_says_when_it_saves")],
    "the same with the runner `lightning`": [
        (LIGHTNING, "test_callbacks_that_save_or_average_see_the_steps_of_the_only_client"),
        (LIGHTNING, "test_a_run_saved_within_a_round_resumes_at_its_beginning_to_the_same_bits"),
    ],
    "`ModelCheckpoint` that saves before": [
        ("trainer/test_checkpointing.py", "test_a_round_that_is_saved_before_its_end_is_repeated")
    ],
    "`WeightAveraging`": [
        (LIGHTNING, "test_callbacks_that_save_or_average_see_the_steps_of_the_only_client"),
        (STOCK, "test_weight_averaging_averages_the_servers_models"),
        (STOCK, "test_stochastic_weight_averaging_is_that_of_a_stock_trainer"),
    ],
    "`StochasticWeightAveraging` of": [(STOCK, "test_averages_that_need_one_more_epoch_are_refused")],
    "`BackboneFinetuning`": [(UNFREEZING, "test_one_client_with_all_samples_trains_as_with_lightning")],
    "a `Timer` beside": [(FACE, "test_a_timer_among_the_callbacks_replaces_max_time")],
    "callbacks that you put": [(FACE, "test_the_list_of_callbacks_is_the_users")],
    "`BatchSizeFinder`": [(FACE, "test_the_tuner_is_refused_and_helps_beside_a_federation")],
    "`ModelPruning`": [
        (MODEL_PRUNING, "test_the_model_is_pruned_as_by_lightnings_trainer"),
        (MODEL_PRUNING, "test_what_cannot_be_pruned_with_renamed_parameters_is_refused"),
    ],
    "`SpikeDetection`": [(FACE, "test_callbacks_that_need_a_stock_trainer_are_refused")],
    # data
    "its hooks:": [(BATCHES, "test_hooks_of_the_data_module"), (HOOKS, "test_hooks_come_in_the_same_order")],
    "its attributes": [(WRAPPED, "test_attributes_of_the_data_module_are_found")],
    "training loader in order": [(WRAPPED, "test_loaders_of_all_samples")],
    "training loader with a `Subset": [(WRAPPED, "test_only_the_samples_of_a_subset_sampler_are_divided")],
    "training loader with `batch_size=None`": [(WRAPPED, "test_loaders_of_all_samples")],
    "training loader with `drop_last": [
        (DROPPED, "test_each_client_drops_what_a_stock_trainer_would"),
        (DROPPED, "test_what_is_dropped_is_counted_and_said"),
    ],
    "training loader with another": [
        (WRAPPED, "test_samplers_that_clients_would_not_follow"),
        (WRAPPED, "test_what_cannot_be_divided"),
        (OWN_LOADERS, "test_a_single_client_reads_any_loader_as_lightnings_trainer_does"),
        (OWN_LOADERS, "test_clients_with_streams_are_averaged"),
    ],
    "no training loader": [(OWN_LOADERS, "test_an_evaluation_needs_no_training_data")],
    "no validation loader": [
        (FACE, "test_one_client_with_all_data_reads_what_a_stock_trainer_reads"),
        ("trainer/test_round_evaluation.py", "test_a_run_says_what_it_measures_on"),
    ],
    "no loader for `validate`": [
        ("trainer/test_federated_trainer.py", "test_evaluations_without_a_loader_are_refused")
    ],
    "training loader of your own class": [(WRAPPED, "test_a_loader_that_changes_its_batches_is_named")],
    "classes of the samples": [("data/test_given_classes.py", "test_classes_wherever_they_are")],
    "batches of any structure": [
        ("data/test_batches.py", "test_all_steps_see_the_batches_of_the_stock_trainer"),
        ("data/test_batches.py", "test_a_module_may_change_its_batches"),
        (BATCHES, "test_any_structure_of_batches"),
        (BATCHES, "test_a_value_without_batch_size_of_a_batch_of_an_own_class"),
    ],
    "validation, test": [(BATCHES, "test_any_validation_loaders"), (BATCHES, "test_predictions_of_any_loaders")],
    # the metric that a run is about
    "`--trainer.metric val_f1`": [
        ("outputs/test_metric.py", "test_a_given_metric_goes_before_what_is_found"),
        ("outputs/test_metric.py", "test_a_name_that_is_never_logged_is_refused"),
    ],
    "`--trainer.metric_mode min`": [
        ("outputs/test_metric.py", "test_the_mode_says_what_is_better_where_the_name_does_not")
    ],
    # modules of other packages, tried by `pytest -m thirdparty`
    **{
        package: [("test_thirdparty.py", "test_one_client_is_a_stock_trainer")]
        for package in (
            "anomalib",
            "chemprop",
            "darts",
            "lightly",
            "neuralforecast",
            "pytorch-forecasting",
            "pytorch-tabular",
            "scvi-tools",
            "timm",
            "torchgeo",
            "transformers",
        )
    },
}


def test_each_row_has_its_tests() -> None:
    cells = first_cells(PAGE.read_text())
    assert len(cells) > 40
    check_rows(cells, ROWS)


@pytest.mark.long
def test_these_tests_exist_and_are_not_skipped() -> None:
    check_tests(ROWS)
