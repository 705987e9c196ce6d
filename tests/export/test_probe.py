def test_it(classifier, regressor):
    print(classifier.bundle().manifest.metrics["accuracy"], regressor.bundle().manifest.metrics["r2"])
