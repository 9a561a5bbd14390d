"""Watch training from Python: the progress line, and an observer of your own."""

from ccfa import Learner, Observer, Progress, build_method, load, split


class LossCurve(Observer):
    """Keeps the mean loss of each epoch."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_epoch(self, progress: Progress, losses: dict[str, float], lr: float, seconds: float) -> None:
        self.losses.append(losses["loss"])


train, test = load("digits")
curve = LossCurve()
learner = Learner(build_method("podnet", "digits"), train, progress=True, observer=curve)
for stage in split(train.num_classes, initial=5, increment=5):
    learner.learn(stage)
    accuracy = learner.evaluate(test)["accuracy"]
    print(f"{stage.num_seen} classes, last loss {curve.losses[-1]:.2f}: {accuracy:.1%}")
