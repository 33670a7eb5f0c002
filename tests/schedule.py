"""Which tests are slow, and which of two workers runs what.

`make quick` omits the slow ones. Tests of a file run in one worker, in their order. MEASURING_FILES run one after another in
the same worker, so that no two of them measure at once. The longest files begin, so that both workers end at about the same
time.
"""

from __future__ import annotations

LIMIT_S = 2.0  # a test that takes longer, its fixtures included, belongs to the slow ones
MEASURING = "measuring"  # the group of:
MEASURING_FILES = (
    "benchmark/test_collector.py", "benchmark/test_stressor.py", "benchmark/test_machine_ties.py",
    "benchmark/test_unprofiled.py", "benchmark/test_useful_first.py", "benchmark/test_runner.py",
    "benchmark/test_label_table.py", "benchmark/test_quiet_host.py",
    "benchmark/test_sharing_probe.py", "benchmark/test_anatomy.py", "benchmark/test_metrics.py", "benchmark/test_gpu_access.py",
    "inference/test_evaluator.py", "inference/test_missing_kernels.py", "inference/test_no_training.py",
    "recipes/test_this_device.py", "test_stopping.py",
    "tvm_analysis/test_operators_and_settings.py", "tvm_analysis/test_tvm_collection.py",
    "tvm_analysis/test_tvm_cuda.py")
LONGEST_FIRST = (  # files and groups
    MEASURING, "recipes/test_gpu_dataset.py", "test_readme.py", "inference/test_prometheus.py", "model_zoo/test_exporter.py",
    "inference/test_memory.py", "inference/test_answers.py", "benchmark/test_probe_metrics.py", "test_light_install.py")

SLOW_FIXTURES = {
    "torch_models",       # exports three models
    "trained_workspace",  # trains
    "copy",               # of the repository, for the README's commands
    "part",               # learns from the shipped dataset
    "collected",          # collections, killed and resumed
    "under_load",         # a collection under load; the shipped one
    "energies",           # unpacks a shipped dataset, and predicts its models
    "shipped_energy",     # unpacks a shipped dataset, learns from it
    "profiled",           # measures stages
    "readings",           # unpacks a shipped dataset
    "with_host",          # measures kernels and trains
}
SLOW_FILES = {
    "convolutions/test_gpu_path.py", "convolutions/test_run_profile.py",
    "graph_stages/test_profile_stages.py",    "graph_stages/test_analysis.py", "graph_stages/test_transfers.py",
    "benchmark/test_adding_a_unit.py", "benchmark/test_metrics_exporter.py", "benchmark/test_stressor.py",
    "inference/test_concurrency.py", "inference/test_evaluator.py", "inference/test_missing_kernels.py",
    "inference/test_no_training.py", "inference/test_prometheus.py", "kernel_model/test_kernel_errors.py",
    "model_zoo/test_exporter.py", "model_zoo/test_networks.py", "recipes/test_convolution_dataset.py",
    "recipes/test_convolution_table.py", "recipes/test_gpu_dataset.py", "recipes/test_pool.py",
    "recipes/test_same_predictions.py", "test_light_install.py", "test_scripts.py", "test_stopping.py",
    "convolutions/test_choose_algorithms.py", "training/test_ablation.py", "training/test_composition.py",
    "training/test_training.py", "tvm_analysis/test_operators_and_settings.py", "tvm_analysis/test_tvm_collection.py",
    "tvm_analysis/test_tvm_cuda.py",
}
SLOW_TESTS = {  # by file
    "graph_stages/test_analysis.py": ["test_a_bandwidth_where_there_is_one_and_null_with_a_reason_elsewhere"],
    "graph_stages/test_stages.py": ["test_torchs_stages_are_the_layer_of_torch_geometric"],
    "benchmark/test_anatomy.py": ["test_the_real_workers_need_no_record"],
    "benchmark/test_collector.py": [
        "test_a_further_background_is_measured_where_the_others_are_there", "test_a_worker_that_hangs_or_crashes_is_replaced",
        "test_canaries_that_part_have_their_block_measured_again", "test_labels_are_a_choice",
        "test_numpy_in_and_out_is_a_variant", "test_what_a_worker_prepares_is_not_its_next_reply",
        "test_what_another_machine_measured", "test_a_worker_that_hangs_dies_with_the_collector"],
    "benchmark/test_gpu_access.py": ["test_one_is_alone_and_nobody_starves"],
    "benchmark/test_label_table.py": ["test_a_real_collection"],
    "benchmark/test_machine_ties.py": ["test_exactly_the_ties_are_measured_here_too"],
    "benchmark/test_metric_sources.py": [
        "test_dcgm_stuck_at_zero_is_found_out_by_utilisation_that_nobody_asked_for"],
    "benchmark/test_runner.py": ["test_every_kind_of_work_gives_a_reply"],
    "benchmark/test_sharing_probe.py": ["test_beside_a_real_load", "test_the_long_piece_stays_finite", "test_the_script"],
    "benchmark/test_useful_first.py": ["test_a_collector_stops_in_time_and_the_next_one_goes_on"],
    "benchmark/test_unprofiled.py": ["test_a_collector_goes_on_with_its_labels"],
    "graph_model/test_dag.py": ["test_a_hundred_thousand_nodes_in_linear_time"],
    "graph_model/test_overlap.py": ["test_the_command_profiles_a_model"],
    "inference/test_answers.py": ["test_a_watch_needs_something_to_follow"],
    "inference/test_uncertainty.py": ["test_an_operator_that_was_never_measured_is_a_rough_estimate"],
    "inference/test_host_pace.py": [
        "test_a_pace_that_is_old_or_not_there_or_none", "test_prometheus_tells_the_pace",
        "test_the_command_takes_a_ratio_or_a_machines_file",
        "test_the_evaluator_predicts_at_the_pace_beside_each_model", "test_the_hosts_costs_are_taken_at_the_pace"],
    "inference/test_memory.py": ["test_it_is_what_onnx_runtime_holds", "test_the_error_is_measured_in_a_process_of_its_own"],
    "training/test_estimators.py": ["test_the_page_as_it_stands"],
    "inference/test_predictor.py": ["test_the_function_and_the_methods_say_the_same", "test_files_are_read_once"],
    "kernel_model/test_kernel_builder.py": ["test_the_command_takes_a_kernel_a_record_and_the_index"],
    "kernel_model/test_sampler.py": ["test_a_second_call_tops_up"],
    "ort_analysis/test_bodies.py": ["test_a_loop_costs_what_its_nodes_cost_unrolled"],
    "ort_analysis/test_cuda_capture.py": ["test_every_model_that_was_to_be_captured"],
    "ort_analysis/test_fusion.py": ["test_several_models_and_sizes_side_by_side"],
    "recipes/test_kinds.py": [
        "test_models_are_judged_and_a_second_run_asks_nothing", "test_without_a_gpu_the_comparison_says_what_to_do",
        "test_mixed_half_precision_computes_the_same"],
    "recipes/test_learn.py": ["test_a_figure_that_fails_does_not_stop_the_others"],
    "training/test_predictor_files.py": ["test_sklearn_is_hidden_only_while_a_command_imports_xgboost"],
    "recipes/test_this_device.py": ["test_the_command_is_stopped_and_goes_on"],
    "training/test_learning_curve.py": ["test_more_kernels_hold_the_fewer"],
    "training/test_transfer.py": [
        "test_held_out_times_are_learned_as_the_predictors_were", "test_the_command_keeps_a_copy_of_the_other_predictors"],
    "utils/test_locks.py": ["test_every_script_asks_before_it_writes_or_measures"],
    "utils/test_processes.py": ["test_folder_runs_survive_a_crash", "test_one_that_crashes_costs_only_itself"],
}


def group_of(file: str) -> str:
    """The group of a test file, named as from tests/: a worker runs a group from beginning to end."""
    return MEASURING if file in MEASURING_FILES else file


def position(group: str) -> int:
    """Where a group stands in the order of running."""
    return LONGEST_FIRST.index(group) if group in LONGEST_FIRST else len(LONGEST_FIRST)


def is_slow(file: str, function: str, fixtures: list[str]) -> bool:
    """Whether `make quick` omits a test."""
    return file in SLOW_FILES or function in SLOW_TESTS.get(file, ()) or not SLOW_FIXTURES.isdisjoint(fixtures)
