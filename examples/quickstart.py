"""Learn the ten digits stage by stage, with PODNet and CCFA."""

from ccfa import CCFA, Learner, build_method, load, split, with_augmentation

train, test = load("digits")
learner = Learner(with_augmentation(build_method("podnet", "digits"), CCFA(count=1)), train)
for stage in split(train.num_classes, initial=5, increment=1):
    learner.learn(stage)
    print(f"{stage.num_seen} classes: {learner.evaluate(test)['accuracy']:.1%}")
