"""Profiles: where the data is and how much is spent on it, read from YAML.

`profile.run("puma", seed=0)` makes the `Run` of a row.
"""

from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic.dataclasses import dataclass

from .. import paths
from .methods import METHODS, Method, method, settings_of_method
from .reading import (
    CHECKED,
    Dimensions,
    Positive,
    Rate,
    Seeds,
    changed,
    checked,
    distinct,
    names_of,
    once,
    only_fields,
    read_yaml,
    require_known,
    unknown,
    without,
)
from .run import Data, Run, Training, require_weights

# Losses whose own parameters are a layer, whose weights and bias have no fixed length as proxies
# have: at the rate of proxies one step of AdamW would be larger than they are.
LOSSES_WITH_A_LAYER = ("crossentropy",)

# Recipes of all methods that train every weight of the backbone, and of all others.
TRAINED = "trained backbone"
FROZEN = "frozen backbone"


@dataclass(frozen=True, config=CHECKED)
class Profile:
    """Where the data is and how much is spent: what of every `Run` a table does not choose."""

    # Results are written to results/<name>.
    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$", max_length=60)]
    data: Data = field(default_factory=Data)
    backbone: str = "mini_vit"
    pretrained: str = "embedded"
    dim: Dimensions = 128
    # The fields of `Run`.
    pooling: Literal["avgmax", "timm"] = "avgmax"
    seeds: Annotated[Seeds, AfterValidator(distinct)] = (0,)
    # Of the rows beside the headline ones (Table 3, Figs. 7 and 8); () = seeds.
    side_seeds: Seeds = ()
    # Of rows whose seeds lie far apart: any row has them too, once they are kept.
    further_seeds: Seeds = ()
    # x the ranks, which METHODS gives for a width of 384.
    rank_scale: Annotated[Rate, Field(le=1000)] = 1.0
    # x the tokens of a prompt, 8 for 196 patches.
    prompt_scale: Annotated[Rate, Field(le=1000)] = 1.0
    training: Training = field(default_factory=Training)
    # Settings over those of `training`, from the general to the special: of TRAINED or FROZEN, of a
    # method by its name, with fields of `Method` too, and of a method with a loss ("full/npair").
    recipes: dict[str, dict[str, Any]] = field(default_factory=dict)
    # The large datasets, all others being small; None: by the number of images (claims.large).
    large: Annotated[tuple[str, ...], AfterValidator(once)] | None = None
    # Runs at once on this machine.
    jobs: Positive = 1
    # Address of a Dask scheduler whose workers train.
    dask: str | None = None
    # False: only kept runs are read.
    train: bool = True

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.side_seeds != self.seeds[: len(self.side_seeds)]:
            raise ValueError(
                "side_seeds must be the first of seeds: rows are compared seed by seed"
            )
        all_seeds = (*self.seeds, *self.further_seeds)
        if len(set(all_seeds)) < len(all_seeds):
            raise ValueError("further_seeds: give each once, and none of seeds")
        for key, settings in self.recipes.items():
            self._check_recipe(key, settings)
        require_weights(self.backbone, self.pretrained)
        return self

    def _check_recipe(self, key: str, settings: Mapping[str, Any]) -> None:
        """Raise ValueError where a recipe is of an unknown method, or has a bad field or value.

        Which losses there are is not known here: `puma_study` looks at their names.
        """
        name = key.partition("/")[0]
        if name not in METHODS and key not in (TRAINED, FROZEN):
            raise ValueError(f"recipes: {unknown(name, [TRAINED, FROZEN, *METHODS], 'method')}")
        where = f"recipes.{key}"
        if key in METHODS:
            require_known(where, settings, [*names_of(Training), *settings_of_method()])
            changed(METHODS[key], only_fields(settings, Method), where)
        else:
            require_known(where, settings, names_of(Training))
        changed(self.training, only_fields(settings, Training), where)

    def run(
        self,
        name: str | Method = "puma",
        /,
        *,
        training: Mapping[str, Any] | None = None,
        data: Data | None = None,
        backbone: str | None = None,
        pretrained: str | None = None,
        dim: int | None = None,
        loss: str | None = None,
        loss_settings: Mapping[str, Any] | None = None,
        seed: int | None = None,
        **settings: Any,
    ) -> Run:
        """The `Run` of a method with some `settings` changed, at the profile's scale.

        `training` changes fields of the recipe, the others replace those of `Run`; None is the
        profile's word, or the default.  Raises ValueError, which names a bad field.

        A method's recipe goes by its name, and so holds for whatever is made of it by other
        settings, data or losses too: PUMA without its gate has PUMA's rate.  A special recipe wins
        over a general one, and what is asked for here over all.  A `Method` that is given in place
        of a name keeps those of its settings that are not its namesake's in `METHODS`; one of
        another name is scaled, and has the recipe TRAINED or FROZEN alone.  A loss that names the
        one it holds has the recipe of that one.
        """
        chosen = self._scaled(method(name), settings)
        inner = (loss_settings or {}).get("loss", loss or Run.loss)
        content = {
            "method": chosen,
            "training": self._training_of(chosen, inner, training or {}),
            "data": self.data,
            "backbone": self.backbone,
            "pretrained": self.pretrained,
            "dim": self.dim,
            "pooling": self.pooling,
        }
        given = {
            "data": data,
            "backbone": backbone,
            "pretrained": pretrained,
            "dim": dim,
            "loss": loss,
            "loss_settings": loss_settings,
            "seed": seed,
        }
        for key, value in given.items():
            if value is not None:
                content[key] = value
        return checked(f"profile {self.name!r}", Run, content)

    def at_length(
        self,
        name: str | Method,
        factor: float,
        /,
        *,
        training: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Run:
        """The `Run` of `run`, trained for `factor` times as many epochs.

        As `Training.stretched` does; `training` and `settings` are those of `run`.
        """
        usual = self.run(name, training=training, **settings)
        return replace(usual, training=usual.training.stretched(factor))

    def _scaled(self, chosen: Method, settings: Mapping[str, Any]) -> Method:
        """A method scaled to the backbone and its images, with the settings of its recipe.

        But for what `settings` say.
        """
        scales = {
            "adapter_rank": self.rank_scale,
            "lora_rank": self.rank_scale,
            "prompt_length": self.prompt_scale,
        }
        scaled = {}
        for key, scale in scales.items():
            length = getattr(chosen, key)
            # What is there stays, however small the backbone.
            if length and self._is_usual(chosen, key):
                scaled[key] = max(1, round(scale * length))
        return method(chosen, **{**scaled, **self._settings_of(chosen), **settings})

    @staticmethod
    def _is_usual(chosen: Method, key: str) -> bool:
        """Whether a setting of a method is its namesake's; of a method of another name, always."""
        namesake = METHODS.get(chosen.name, chosen)
        return bool(getattr(chosen, key) == getattr(namesake, key))

    def _settings_of(self, chosen: Method) -> dict[str, Any]:
        """The settings of the method itself in its recipe, except those already changed."""
        found = {}
        recipe = self.recipes.get(chosen.name, {})
        for key, value in only_fields(recipe, Method).items():
            if self._is_usual(chosen, key):
                found[key] = value
        return found

    def _training_of(self, chosen: Method, loss: str, changes: Mapping[str, Any]) -> Training:
        """The training of a method with a loss, by the recipes that are for it."""
        of_all = self.recipes.get(TRAINED if chosen.tune_backbone else FROZEN, {})
        of_method = only_fields(self.recipes.get(chosen.name, {}), Training)
        usual = {**of_all, **of_method}
        nobody_chose = self.training.loss_lr_factor == Training.loss_lr_factor
        if loss in LOSSES_WITH_A_LAYER and nobody_chose:
            usual["loss_lr_factor"] = usual.get("new_lr_factor", self.training.new_lr_factor)

        with_loss = self.recipes.get(f"{chosen.name}/{loss}", {})
        where = f"profile {self.name!r}, training"
        return changed(self.training, {**usual, **with_loss, **changes}, where)


def profile(name: str, /, **changes: Any) -> Profile:
    """Read `notebooks/profiles/<name>.yaml`, or the YAML file `name`.

    A file is absolute, or as `paths.find` has it.  `changes` that are not None replace the file's
    word: any field of `Profile`, `Data` or `Training`; a field of `Training` wins over the file's
    recipes too, and of `recipes` those that are named are replaced.  Raises ValueError, which names
    a bad field and what is allowed.
    """
    read = _read_profile(_profile_file(name))
    where = f"profile {read.name!r}"
    asked = {key: value for key, value in changes.items() if value is not None}
    require_known(where, asked, overridable())
    for whole, kind in (("data", Data), ("training", Training)):
        single = list(only_fields(asked, kind))
        if whole in asked and single:
            what = f"{where}: {whole} and {single[0]} are both given"
            raise ValueError(f"{what}; give {single[0]} within {whole}")

    # The data.  A split is of the images of its own root.
    of_data = only_fields(asked, Data)
    if "root" in of_data and "split" not in of_data:
        of_data["split"] = None
    own: dict[str, Any] = {"data": changed(read.data, of_data, where)}

    # The training.  Settings that are asked for win over the recipes too.
    of_training = only_fields(asked, Training)
    own["training"] = changed(read.training, of_training, where)
    left = {key: without(settings, of_training) for key, settings in read.recipes.items()}
    of_recipes = checked(f"{where}: recipes", dict[str, Any], asked.pop("recipes", {}))
    own["recipes"] = {**left, **of_recipes}

    # The profile.  Seeds that are asked for are for all rows.
    if "seeds" in asked:
        own["side_seeds"] = ()
        own["further_seeds"] = ()
    own.update(only_fields(asked, Profile))
    return changed(read, own, where)


def require_values(changes: Mapping[str, Any]) -> None:
    """Raise ValueError where a change that a user wrote is null: `profile` takes that for none."""
    for name, value in changes.items():
        if value is None:
            raise ValueError(f"{name} = null would change nothing: give a value, or leave it out")


def overridable() -> list[str]:
    """The names that `profile` takes as changes."""
    names = [*names_of(Profile), *names_of(Data), *names_of(Training)]
    names.remove("name")
    return names


def _profile_file(name: str) -> Path:
    """The file of a profile, by its name among ours or by its path."""
    known = _our_profiles()
    if name in known:
        return known[name]
    file = paths.find(name)
    if file.is_file():
        return file
    if paths.IN_CHECKOUT:
        ours = f"known: {', '.join(sorted(known))}"
    else:
        ours = "those of the study need its checkout: PUMALIB_ROOT=<checkout>"
    raise ValueError(f"no profile {name!r}; {ours}; or give the path of a YAML file")


def _our_profiles() -> dict[str, Path]:
    """The files of notebooks/profiles by name; none where pumalib runs without its checkout."""
    if not paths.IN_CHECKOUT:
        return {}
    return {file.stem: file for file in paths.PROFILES.glob("*.yaml")}


# Folders of results that are no profile's: the timings.
_OTHER_RESULTS = ("bench",)


# What files had before there was one mapping of recipes, and may have still.
_OLD_RECIPES: dict[str, Any] = {
    "full": dict[str, Any],
    "frozen": dict[str, Any],
    "tuned": dict[str, dict[str, Any]],
    "tuned_losses": dict[str, dict[str, dict[str, Any]]],
}


def _in_one_mapping(content: dict[str, Any], where: str) -> dict[str, Any]:
    """A profile's settings, with the four old keys turned into `recipes`."""
    old = {}
    for name, kind in _OLD_RECIPES.items():
        if name in content:
            old[name] = checked(f"{where}: {name}", kind, content[name])
    if not old:
        return content
    if "recipes" in content:
        raise ValueError(f"{where}: what stands under {', '.join(old)} belongs under recipes")

    recipes = {}
    if "full" in old:
        recipes[TRAINED] = old["full"]
    if "frozen" in old:
        recipes[FROZEN] = old["frozen"]
    recipes.update(old.get("tuned", {}))
    for method_name, of_losses in old.get("tuned_losses", {}).items():
        for loss, settings in of_losses.items():
            recipes[f"{method_name}/{loss}"] = settings
    return {**without(content, _OLD_RECIPES), "recipes": recipes}


def _read_profile(file: Path) -> Profile:
    try:
        content = read_yaml(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file.name} is no YAML: {error}") from None
    if content is None:
        content = {}
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ValueError(f"{file.name}: a profile is a mapping of settings, not {kind}")
    content = _in_one_mapping(content, file.name)
    read = checked(file.name, Profile, {"name": file.stem, **content})
    if read.name.casefold() in _OTHER_RESULTS:
        raise ValueError(
            f"{file}: results/{read.name} holds other results; give it another name by `name:`"
        )
    # Some file systems take names for one that differ in upper and lower case alone.
    ours = {name.casefold(): own for name, own in _our_profiles().items()}.get(read.name.casefold())
    if ours is not None and not ours.samefile(file):
        raise ValueError(
            f"{file}: {read.name!r} is the name of {paths.shown(ours)}, with whose results its own "
            "would be mixed; give it another by `name:`"
        )
    return read
