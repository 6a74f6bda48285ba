"""The configuration of a run: layers, TOML there and back, and the sentences for what is wrong."""

import dataclasses
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgist import methods
from fedgist.core.errors import FedgistError
from fedgist.data import datasets, partitions
from fedgist.experiments import inputs
from fedgist.experiments.config import (
    RunConfig,
    assignments,
    differences,
    digest,
    dump,
    flat,
    load,
    model_spec,
    resolve,
)
from fedgist.options import Role, having, options

METHODS = list(methods.available())


@pytest.mark.parametrize("method", METHODS)
def test_no_option_of_a_method_has_the_name_of_an_option_of_the_run(method):
    known = {**options(methods.find(method).Config), **options(RunConfig)}
    assert len(known) == len(options(methods.find(method).Config)) + len(options(RunConfig))
    assert not {option.formerly for option in known.values()} & known.keys()


@pytest.mark.parametrize("method", METHODS)
def test_every_option_has_a_sentence(method):
    for known in (options(RunConfig), options(methods.find(method).Config)):
        assert all(o.help.endswith((".", "?")) for o in known.values())


@pytest.mark.parametrize(("method", "profile"), [(m, p) for m in METHODS for p in methods.find(m).profiles])
def test_profiles_survive_toml(method, profile, tmp_path):
    config = resolve({"method": method}, profile=profile)
    path = tmp_path / "config.toml"
    path.write_text(dump(config), encoding="utf-8")
    assert resolve(load(path)) == config
    assert resolve(flat(config)) == config


@given(st.text(), st.floats(min_value=1e-300, max_value=1e300), st.none() | st.integers(0), st.lists(st.text()))
def test_toml_is_exact(text, number, maybe, several):
    config = RunConfig(method="fedavg", data_dir=text, alpha=number, partition_seed=maybe, record=tuple(several))
    read = tomllib.loads(dump(config))
    assert read["data_dir"] == text
    assert read["alpha"] == number
    assert read["partition_seed"] == ("none" if maybe is None else maybe)
    assert read["record"] == several


def test_layers_win_in_order(tmp_path):
    profile = methods.find("fedavg").profiles["toy"]
    file = tmp_path / "mine.toml"
    file.write_text("clients = 7\nrounds = 4\n[options]\nlr = 0.5\n")
    from_file = load(file)
    config = resolve({"method": "fedavg"}, from_file, assignments(["rounds=9", "batch = 11"]), profile="toy")
    assert config.model == profile["model"]  # from the profile alone
    assert config.clients == 7  # the file over the default
    assert config.options.lr == 0.5  # the file over the profile
    assert config.rounds == 9  # the command line over both
    assert config.options.batch == 11
    assert config.alpha == RunConfig.alpha


def test_what_differs_is_named():
    a = resolve({"method": "fedavg"})
    b = resolve({"method": "fedavg", "clients": 5, "lr": 0.5})
    assert differences(a, a) == []
    assert differences(a, b) == ["clients was 10 and is now 5", f"lr was {a.options.lr} and is now 0.5"]


def test_the_name_of_a_configuration_does_not_depend_on_its_seed():
    config = resolve({"method": "fedavg"})
    assert digest(dataclasses.replace(config, seed=3, seeds=2)) == digest(config)
    assert digest(dataclasses.replace(config, clients=3)) != digest(config)
    assert digest(resolve({"method": "fedavg", "lr": 0.5})) != digest(config)


def test_runs_made_before_are_found_again():
    """Folders are named by these digits, so that an option that moves, or comes to be, must not change them."""
    assert digest(resolve({"method": "fedavg"})) == "3436a2b7"
    assert digest(resolve({"method": "fedavg", "device": "cpu", "engine": "stacked"})) == "7760b481"


def test_every_option_of_a_partition_can_be_set():
    """Each kind's options are fields of the run, with the same defaults."""
    for kind in partitions.KINDS:
        for name, default in partitions.options(kind).items():
            assert options(RunConfig)[name].default == default


def test_the_ground_of_a_comparison_holds_every_option_of_the_partition():
    assert {name for kind in partitions.KINDS for name in partitions.options(kind)} <= set(
        having(RunConfig, Role.GROUND)
    )


SPLIT = ["clients", "partition", "alpha", "min_size", "ratio", "shards_per_client", "partition_seed"]


@pytest.mark.parametrize(
    ("role", "names"),
    [
        (
            Role.GROUND,
            ["dataset", "normalise", "limit", *SPLIT, "discrepancy", "seed", "seeds", "client_test", "offline"],
        ),
        (Role.SITES, [*SPLIT, "architectures"]),
        (
            Role.SIMULATION,
            [
                "discrepancy",
                "seeds",
                "client_test",
                "validation",
                "workers",
                "offline",
                "delay",
                "adversary",
                "defence",
            ],
        ),
        (
            Role.EXECUTION,  # tf32 is not among them: it changes what comes out
            [
                "data_dir",
                "seed",
                "seeds",
                "engine",
                "device",
                "workers",
                "checkpoint_every",
                "artifacts_every",
                "record",
            ],
        ),
    ],
)
def test_which_options_mean_something_where(role, names):
    assert having(RunConfig, role) == names


def test_methods_options_say_what_is_computed():
    """One with a role would be left out of the names of runs, or of a comparison's, without anybody's notice."""
    for name in methods.available():
        config = methods.find(name).Config
        assert not having(config, ~Role.LATER), name


def test_normalisations_are_named_in_the_sentence():
    assert all(name in options(RunConfig)["normalise"].help for name in datasets.NORMALISATIONS)


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("mlp", "mlp", {}),
        ("mlp:hidden=200x100:norm=batch", "mlp", {"hidden": (200, 100), "norm": "batch"}),
        ("cnn:feature_size=64:norm=none", "cnn", {"feature_size": 64, "norm": "none"}),
    ],
)
def test_models_with_options(text, name, expected):
    assert model_spec(text) == (name, expected)


def wrong(**values):
    return resolve({"method": "fedavg"}, values)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"alpha": -1}, "alpha must be greater than 0, not -1.0"),
        ({"alpha": 0.0}, "alpha must be greater than 0, not 0.0"),
        ({"alpha": float("nan")}, "alpha must be a number, not nan"),
        ({"alpha": float("inf")}, "alpha must be a number of at most 3.4e[+]38 in size, not inf"),
        ({"ratio": 0}, "ratio must be greater than 0, not 0.0"),
        ({"ratio": 1.5}, "ratio must be at most 1, not 1.5"),
        ({"min_size": -1}, "min_size must be at least 0, not -1"),
        ({"shards_per_client": 0}, "shards_per_client must be at least 1, not 0"),
        ({"shards_per_client": 1.5}, "shards_per_client must be a whole number, not 1.5"),
        ({"clients": 0}, "clients must be at least 1, not 0"),
        ({"rounds": 0}, "rounds must be at least 1, not 0"),
        ({"active": 11}, "11 active clients a round are more than the 10 clients that there are"),
        ({"offline": 2}, "offline must be at most 1, not 2.0"),
        ({"client": 3}, "unknown option 'client'; did you mean 'clients'"),
        ({"momentun": 3}, "unknown option 'momentun'; did you mean 'momentum'"),
        ({"model": "mlp:200"}, "a model's options are written name:key=value:key=value, not 'mlp:200'"),
        ({"record": "Locl"}, "unknown message type of fedavg 'Locl'; did you mean 'Local'"),
        ({"method": "fedavgg"}, "unknown method 'fedavgg'; did you mean 'fedavg'"),
        ({"client_test": "mine"}, "unknown client_test 'mine'; known: all, own-labels, own-share"),
    ],
)
def test_what_is_wrong_is_said(values, sentence):
    with pytest.raises(FedgistError, match=f"^{sentence}"):
        wrong(**values)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"dataset": "digit"}, "unknown dataset 'digit'; did you mean 'digits'"),
        ({"model": "mpl"}, "unknown model 'mpl'; did you mean 'mlp'"),
        ({"architectures": "mlp,lenett5"}, "unknown model 'lenett5'; did you mean 'lenet5'"),
        ({"partition": "dirichlett"}, "unknown partition 'dirichlett'; did you mean 'dirichlet'"),
        ({"normalise": "halff"}, "unknown normalisation 'halff'; did you mean 'half'"),
        (
            {"partition": "dirichlet-fedgen", "ratio": 0.0001, "min_size": 0},
            "partition 'dirichlet-fedgen' of 1438 samples leaves every client empty",
        ),
    ],
)
def test_what_the_data_shows_wrong_is_said(values, sentence):
    config = dataclasses.replace(wrong(**values), device="cpu")
    with pytest.raises(FedgistError, match=sentence):
        inputs.from_dataset(config)


def test_unknown_profiles_and_files(tmp_path):
    with pytest.raises(FedgistError, match="unknown profile of fedavg 'papper'; did you mean 'paper'"):
        resolve({"method": "fedavg"}, profile="papper")
    with pytest.raises(FedgistError, match="there is no configuration file"):
        load(tmp_path / "none.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("rounds = \n")
    with pytest.raises(FedgistError, match=r"bad\.toml is not TOML"):
        load(bad)
    bad.write_text("[options]\nrounds = 3\n")
    with pytest.raises(FedgistError, match="rounds is an option of the run: write it above"):
        load(bad)
    bad.write_text("[option]\nlr = 3\n")
    with pytest.raises(
        FedgistError, match=r"there is no table \[option\]; the method's own options stand in \[options\]"
    ):
        load(bad)
    bad.write_text("options = 3\n")
    with pytest.raises(FedgistError, match="options must be a table"):
        load(bad)
    with pytest.raises(FedgistError, match="--set wants key=value, not 'rounds'"):
        assignments(["rounds"])


def test_clients_get_architectures_in_turn_and_padded_names():
    config = resolve({"method": "independent", "clients": 11, "architectures": "mlp:hidden=8,cnn"})
    made = inputs.from_dataset(dataclasses.replace(config, device="cpu"))
    assert list(made.sites) == [f"{i:02d}" for i in range(11)]
    assert [made.info[f"{i:02d}"]["model"] for i in range(3)] == ["mlp:hidden=8", "cnn", "mlp:hidden=8"]
    assert set(made.task.models) == {"mlp", "mlp:hidden=8", "cnn"}


def test_the_partition_follows_its_own_seed_when_it_has_one():
    def parts(**values):
        config = resolve({"method": "fedavg", "device": "cpu", **values})
        return inputs.from_dataset(config).sha256

    assert parts(seed=0) != parts(seed=1)
    assert parts(seed=0, partition_seed=5) == parts(seed=1, partition_seed=5)


def test_clients_may_test_on_their_own_labels():
    config = resolve({"method": "fedavg", "device": "cpu", "partition": "shards", "client_test": "own-labels"})
    made = inputs.from_dataset(config)
    for site in made.sites.values():
        assert set(site.test[1].tolist()) == set(site.y.tolist())
    shared = inputs.from_dataset(dataclasses.replace(config, client_test="all"))
    assert all(site.test[0] is shared.test[0] for site in shared.sites.values())
