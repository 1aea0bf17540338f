// A tensor is a cheap handle on contiguous storage of one element type; the last handle frees the storage. In a meta
// run it has a shape but no data. Writing: fresh() fills a tensor that nobody has read yet; mutate() is any later write
// and bumps the version, by which the tape notices that a value it holds was changed in place. Elements are read and
// written as what they are: another type than the tensor's is an error; void and char are bytes.
#pragma once
#include <memory>
#include <vector>

#include "tensor/element.h"
#include "tensor/memory.h"

namespace regather {

class Tensor {
 public:
  Tensor() = default;
  Tensor(Allocator& memory, const Shape& shape, Tag tag, DType dtype = DType::F32)
      : storage_(
            std::make_shared<Storage>(Buffer(memory, shape.numel() * static_cast<std::int64_t>(size_of(dtype)), tag))),
        shape_(shape),
        dtype_(dtype) {}

  explicit operator bool() const { return storage_ != nullptr; }
  const Shape& shape() const { return shape_; }
  DType dtype() const { return dtype_; }
  std::int64_t numel() const { return shape_.numel(); }
  std::int64_t bytes() const { return shape_.numel() * static_cast<std::int64_t>(size_of(dtype_)); }
  template <class T = float>
  const T* data() const {
    return holding<T>().buffer.template data<T>();
  }
  template <class T = float>
  T* fresh() {
    return holding<T>().buffer.template data<T>();
  }
  template <class T = float>
  T* mutate() {
    ++holding<T>().version;
    return storage_->buffer.template data<T>();
  }
  unsigned version() const { return checked().version; }
  bool same_storage(const Tensor& other) const { return storage_ == other.storage_; }
  bool sole_owner() const { return storage_.use_count() == 1; }
  void reset() { storage_.reset(); }
  // The same value in another shape of as many elements.
  Tensor view(const Shape& shape) const {
    check(shape.numel() == numel(), "view: {} has {} elements, {} has {}", shape_.to_string(), numel(),
          shape.to_string(), shape.numel());
    Tensor t = *this;
    t.shape_ = shape;
    return t;
  }

  std::uint32_t tape = 0;  // which tape's value this is; 0: none, a constant
  int id = -1;

 private:
  struct Storage {
    explicit Storage(Buffer b) : buffer(std::move(b)) {}
    Buffer buffer;
    unsigned version = 0;
  };
  Storage& checked() const {
    if (!storage_) throw LogicError("read of an undefined tensor (a value that saved() does not declare?)");
    return *storage_;
  }
  template <class T>
  Storage& holding() const {
    if constexpr (!std::is_void_v<T> && !std::is_same_v<T, char>)
      if (Element<T>::dtype != dtype_)
        throw LogicError(
            fmt::format("{} elements are read or written as {}", name_of(dtype_), name_of(Element<T>::dtype)));
    return checked();
  }
  std::shared_ptr<Storage> storage_;
  Shape shape_;
  DType dtype_ = DType::F32;
};

using Activations = std::vector<Tensor>;

}  // namespace regather
